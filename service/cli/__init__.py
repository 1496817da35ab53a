"""The command line, one file a subcommand; each has `add_parser` and `run`."""
