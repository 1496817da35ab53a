"""State dicts without a config: their names, sizes and layouts, maps of names, and adapters merged into them."""
