"""Turn bytes into uint8 pixels (`preprocess`) and attention maps into PNGs (`heatmap`).

This package uses PIL and numpy, never torch. To add an image format, see `formats`.
"""
