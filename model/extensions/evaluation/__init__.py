"""Evaluation of a model on labelled pictures: accuracy, loss, calibration error."""
