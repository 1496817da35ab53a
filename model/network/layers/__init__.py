"""The building blocks of Vision Transformers, one file per concern."""
