"""The model card of a training run, and its figures."""
