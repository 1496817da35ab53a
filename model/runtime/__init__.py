"""What owns a device: the predictor, its backends, and how a batch travels to a device and back."""
