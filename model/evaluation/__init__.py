"""Evaluation of a model on pictures: accuracy, calibration, robustness, and how faithful maps of it are."""
