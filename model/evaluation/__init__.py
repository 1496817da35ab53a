"""Evaluation of a model on labelled pictures: accuracy, calibration, and pictures as users send them."""
