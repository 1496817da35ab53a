"""Training: the recipe that made the bundled checkpoint."""
