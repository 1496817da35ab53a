"""The building blocks of Vision Transformers, a file for each concern."""
