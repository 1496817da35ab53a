"""Augmentation of whole batches of pictures on the device."""
