"""The command line, one file a subcommand: each has `add_arguments`, which declares its flags, and `run`."""
