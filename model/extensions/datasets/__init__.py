"""Labelled pictures in folders, their splits and their decoding, for training and evaluation."""
