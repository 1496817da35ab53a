"""Bytes become uint8 pixels (`preprocess`), attention maps become PNGs (`heatmap`). PIL and numpy,
never torch.

To add an image format, see `formats`.
"""
