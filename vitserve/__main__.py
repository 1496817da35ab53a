"""`vitserve`: run the command line of this installation, `service.cli.main`."""

import sys
from importlib import import_module
from pathlib import Path


def main() -> int:
    """Run one subcommand, and return the exit code.

    `service` and `model` come from this package's own parent folder. With `python -m` or PYTHONPATH
    Python would look elsewhere first, for example in a folder with files of these names.
    """
    try:
        return _run()
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "service", "model", "vitserve"):
            raise
        print(  # noqa: T201
            f"vitserve: the package {missing} is not installed: "
            "the commands need more packages than the client: pip install vitserve",
            file=sys.stderr,
        )
        return 1


def _run() -> int:
    home = str(Path(__file__).parent.parent)
    sys.path.insert(0, home)
    try:
        for name in ("service", "model"):
            import_module(name)  # Python now finds their modules in the imported packages
    finally:
        sys.path.remove(home)
    code: int = import_module("service.cli.main").main()
    return code


if __name__ == "__main__":
    sys.exit(main())
