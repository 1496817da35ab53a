"""Parts of the service above its core, each in its own folder; the core does not import them."""
