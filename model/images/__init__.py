"""Bytes to uint8 pixels, and attention maps to pictures. PIL and numpy, never torch."""
