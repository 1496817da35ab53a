"""The building blocks of Vision Transformers, one file a concern."""
