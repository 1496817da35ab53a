"""What operators see of the service: metrics, spans and logs."""
