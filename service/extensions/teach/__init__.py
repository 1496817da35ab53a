"""Heads that the service learns from labelled pictures: examples, fits, and routes."""
