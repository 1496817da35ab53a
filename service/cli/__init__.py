"""The command line: one file per subcommand.

Each file has `add_arguments`, which declares the flags, and `run`, which returns the exit code. If
the subcommand fails, `run` raises a `VitError` or `ServiceError` with a message of one line.
"""
