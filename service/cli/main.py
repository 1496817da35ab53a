"""`vitserve`: the command line.

Each subcommand is a module of `service.cli` with `add_arguments` and `run`. Only the module of the
chosen one is imported, so that `vitserve --help` is quick and `vitserve classify --url` needs no torch.
"""

import argparse
import importlib
import os
import platform
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from model.errors import VitError
from service.errors import ServiceError
from vitserve import __version__

# Each subcommand, which is a module of `service.cli`, and its line in `vitserve --help`.
COMMANDS = {
    "serve": "serve a checkpoint over HTTP (the default)",
    "classify": "classify files or folders of pictures",
    "embed": "write the embeddings of files or folders as one NumPy file",
    "attention": "draw a heat map of where the model looks",
    "evaluate": "measure a checkpoint's accuracy on labelled pictures",
    "calibrate": "fit scores and sets of labels to labelled pictures",
    "teach": "make a head from a folder of pictures for each label, here or in a server",
    "train": "train or fine-tune a model on a folder of pictures",
    "inspect": "print what a checkpoint is",
    "convert": "write a checkpoint as vitserve's own folder",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand, and return the exit code: 0, or 1 after an error that one line explains."""
    open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    # `vitserve --port 9000` is `vitserve serve --port 9000`.
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        arguments.insert(0, "serve")
    if arguments[0] == "serve" and platform.machine() == "x86_64":
        # NumPy's threads spin after each product, and take the cores from the networks. Elsewhere they may be torch's.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    parser, chosen = _parser(arguments[0])
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        options = re.findall(r"--[a-z-]+", chosen.format_help())
        given = unknown[0].partition("=")[0]
        longer = sorted({each for each in options if given.startswith("--") and each.startswith(given)})
        near = longer[:5] or get_close_matches(given, options, 1)
        meant = f": did you mean {' or '.join(near)}?" if near else ""
        chosen.error(f"{unknown[0]} is none of its options{meant}")
    import logging  # noqa: PLC0415  `--help` is quicker without

    # Pillow describes each file that it reads; what is wrong with one is in the answer to its sender.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    try:
        code: int = _command(arguments[0]).run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:  # such as `vitserve classify pictures/ | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python writes what is left
        return 1
    except (VitError, ServiceError) as error:
        print(f"vitserve: {error}", file=sys.stderr)  # noqa: T201
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def open_standard_streams() -> None:
    """Let a standard stream that is closed lead nowhere.

    Else the next socket would get its number: libraries would write to it, and libuv aborts when it is closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest that is free
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or Path(os.devnull).open("w")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w")  # noqa: SIM115


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with one line; the usage of all options would hide it."""
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists them)\n")


def _parser(chosen: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return a parser that knows the name of every subcommand, and that of the flags of the chosen one."""
    parser = _Parser(prog="vitserve", description="Serves a Vision Transformer over HTTP.")
    parser.add_argument("--version", action="version", version=f"vitserve {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    of_chosen: argparse.ArgumentParser = parser
    for name, summary in COMMANDS.items():
        # An abbreviation would mean another option, or none, as soon as an option with the same beginning is added.
        subparser = subparsers.add_parser(name, help=summary, allow_abbrev=False)
        if name == chosen:
            of_chosen = subparser
            _command(name).add_arguments(subparser)
    return parser, of_chosen


def _command(name: str) -> ModuleType:
    return importlib.import_module(f"service.cli.{name}")
