"""How good a model is on labelled pictures: accuracy, calibration, robustness."""
