"""The metrics of the service, of its engines and of its GPUs."""
