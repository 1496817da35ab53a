"""The HTTP service around a model: one request's way, in order."""
