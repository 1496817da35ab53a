"""Labelled pictures that are shared by training and evaluation: CIFAR-10, folders of pictures,
splits.
"""
