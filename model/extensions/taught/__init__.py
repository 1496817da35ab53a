"""Heads and scores fitted to features, and the file of a taught head. No torch is needed."""
