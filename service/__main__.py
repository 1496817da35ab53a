"""`vitserve`: the composition root and the command line.

Each subcommand is a module of `service.cli`. Torch is imported only when a model is loaded, so
that `vitserve classify --url` needs none and `vitserve --help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from model.errors import VitError
from service.cli import attention, bench, classify, convert, evaluate, inspect, serve, train
from service.errors import ServiceError


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run one subcommand.

    Returns:
        The exit code: 0, or 1 after an error that one line explains.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="vitserve", description="Serves a Vision Transformer over HTTP.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for module in (serve, classify, attention, evaluate, train, inspect, convert, bench):
        module.add_parser(commands)
    # `vitserve --port 9000` is `vitserve serve --port 9000`.
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
        arguments.insert(0, "serve")
    parsed = parser.parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
    except (VitError, ServiceError) as error:
        print(f"vitserve: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
