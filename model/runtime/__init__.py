"""The owners of a device: the predictor and its backends."""
