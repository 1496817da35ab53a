"""The subcommand that trains and fine-tunes networks."""
