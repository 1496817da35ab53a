"""Parts of the service above its core, each in a folder of its own; the core imports none of them."""
