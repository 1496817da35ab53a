"""`vitserve`: starts the command line of the service, `service.cli.main`, of this installation."""

import sys
from importlib import import_module
from pathlib import Path


def main() -> int:
    """Run one subcommand, and return the exit code.

    `service` and `model` are taken from beside this package. `python -m` and PYTHONPATH have Python
    look elsewhere first, for example in a folder whose programs have files of these names.
    """
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "service", "model", "vitserve"):
            raise
        print(  # noqa: T201
            f"vitserve: the package {missing} is not installed: the client alone needs httpx and pydantic, the "
            "commands need the rest: pip install vitserve",
            file=sys.stderr,
        )
        return 1


def _run() -> int:
    home = str(Path(__file__).parent.parent)
    sys.path.insert(0, home)
    try:
        for name in ("service", "model"):  # their modules are found in them from now on
            import_module(name)
    finally:
        sys.path.remove(home)
    code: int = import_module("service.cli.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
