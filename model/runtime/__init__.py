"""What owns a device: the predictor and its backends."""
