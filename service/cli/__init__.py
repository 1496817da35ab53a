"""The command line, one file a subcommand.

Each has `add_arguments`, which declares its flags, and `run`, which returns the exit code or raises
a `VitError` or `ServiceError` whose one line says why not.
"""
