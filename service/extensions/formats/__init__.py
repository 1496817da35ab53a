"""The subcommand that converts checkpoints."""
