"""Evaluation of a model on labelled pictures: accuracy, calibration, robustness."""
