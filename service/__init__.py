"""The HTTP service around a model, and the path of a request through it."""
