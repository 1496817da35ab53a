"""Vision Transformers without a server."""
