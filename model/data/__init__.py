"""Labelled pictures, shared by training and evaluation: CIFAR-10, folders of pictures, splits."""
