"""All that is true of a Vision Transformer without a server."""
