"""`vitserve`: the command line.

Each subcommand is a module with `add_arguments` and `run`. Only the chosen subcommand's module is
imported, so that `vitserve --help` is quick and `vitserve classify --url` works without torch.
"""

import argparse
import codecs
import errno
import importlib
import io
import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn, TextIO

from model.errors import VitError
from model.extension import CORE, claim
from service.errors import ServiceError
from service.extension import Command, extensions, naming
from vitserve import __version__

_CORE_COMMANDS: Final = {
    "serve": Command(
        "service.cli.serve",
        "serve a checkpoint over HTTP (the default)",
        synonyms=("run", "start", "server", "up"),
    ),
    "classify": Command(
        "service.cli.classify",
        "classify files or folders of pictures",
        example="vitserve classify photo.jpg",
        synonyms=("predict", "infer", "label", "recognize"),
    ),
    "embed": Command(
        "service.cli.embed",
        "write the embeddings of files or folders as one NumPy file",
        example="vitserve embed photos/ -o features.npy",
        synonyms=("embeddings", "features", "encode"),
    ),
    "attention": Command(
        "service.cli.attention",
        "draw a heat map of where the model looks",
        example="vitserve attention photo.jpg -o map.png",
        synonyms=("explain", "heatmap", "map"),
    ),
}


@cache
def commands() -> dict[str, Command]:
    """Return the subcommands of the core and of all extensions by name; raises `ExtensionError`."""
    by_name = dict(_CORE_COMMANDS)
    owners = dict.fromkeys(by_name, CORE)
    for extension in extensions():
        with naming(extension, "commands"):
            claim(extension.commands, "the subcommand", extension, owners)
            for command in extension.commands.values():
                if not isinstance(command, Command):
                    raise TypeError(f"{command!r} is not a `service.extension.Command`")
        by_name |= extension.commands
    return by_name


# Errors of standard output: a closed pipe, a full disk, a lost terminal.
_OUTPUT_ERRORS: Final = (errno.EPIPE, errno.ENOSPC, errno.EIO)

# Options of `vitserve` itself.
_OF_ALL: Final = ("-h", "--help", "-V", "--version")

# Options that other programs have, and ours; only options of the subcommand are suggested.
_OPTIONS_MEANT: Final = {
    **dict.fromkeys(
        ("--model", "--weights", "--checkpoint", "--pretrained", "--ckpt"),
        ("--checkpoint", "--from"),
    ),
    **dict.fromkeys(("--gpu", "--cuda", "--cpu"), ("--device",)),
    **dict.fromkeys(("--lr", "--learning-rate", "--weight-decay", "--optimizer"), ("--set",)),
    **dict.fromkeys(("--bind", "--listen", "--address", "--ip"), ("--host",)),
    **dict.fromkeys(("--key", "--token", "--auth"), ("--api-key", "--api-keys")),
    **dict.fromkeys(("--server", "--endpoint", "--host"), ("--url",)),
    **dict.fromkeys(
        ("--dataset", "--images", "--input", "--path", "--dir", "--folder", "--train"), ("--data",)
    ),
    **dict.fromkeys(("--classes", "--names", "--class-names"), ("--labels",)),
    **dict.fromkeys(("--batch", "--batch-size"), ("--max-batch", "--batch-size")),
    **dict.fromkeys(("--img-size", "--imgsz", "--size", "--resolution"), ("--image-size",)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code: 1 after an error, which one line explains."""
    open_standard_streams()
    replace_unknown_characters(sys.stdout, sys.stderr)
    arguments = _with_command(sys.argv[1:] if argv is None else argv)
    if arguments[0] == "serve" and platform.machine() == "x86_64":
        # NumPy's threads spin after each product, and take the cores from the networks. Elsewhere
        # they may be torch's.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except (VitError, ServiceError) as error:
        print(f"vitserve: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        _explain(error)
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _with_command(typed: Sequence[str]) -> list[str]:
    """Return typed arguments in one form: `vitserve --port 9000` means `vitserve serve ...`."""
    arguments = list(typed)
    if arguments[:1] == ["help"]:
        return [*arguments[1:2], "--help"]
    if arguments == ["version"]:
        return ["--version"]
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in _OF_ALL):
        return ["serve", *arguments]
    return arguments


def _explain(error: OSError) -> None:
    """Print one line about a file that cannot be used, or about standard output.

    Raises:
        OSError: the error itself, if it is of another kind.
    """
    if error.filename is not None:
        print(f"vitserve: {error.filename}: {error.strerror}", file=sys.stderr)
        return
    if error.errno not in _OUTPUT_ERRORS:
        raise error
    # At exit, Python flushes the rest of its buffer, which would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno != errno.EPIPE:  # `vitserve classify pictures/ | head` is not an error
        print(f"vitserve: standard output: {error.strerror}", file=sys.stderr)


def _run(arguments: list[str]) -> int:
    """Run the subcommand that the first argument names, and return its exit code."""
    parser, chosen = _parser(arguments[0])
    if arguments[0] not in commands() and not arguments[0].startswith("-"):
        parser.error(_unknown_command(arguments[0]))
    if any(argument == "" or re.fullmatch(r"--[\w-]+=", argument) for argument in arguments):
        chosen.error("an argument is empty: is a variable in quotes unset?")
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        chosen.error(_unknown_argument(arguments[0], unknown[0], chosen))
    import logging  # noqa: PLC0415  `--help` is quicker without

    # The errors of checkpoints say the same, and what to do.
    warnings.filterwarnings("ignore", module=r"model\.checkpoint")
    # Pillow would log each bad file; the answer to its sender already has the error.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    with _naming_outsider(arguments[0]):
        code: int = _command(arguments[0]).run(parsed)
    return code


def open_standard_streams() -> None:
    """Reopen closed standard streams on /dev/null.

    Otherwise the next socket would get the stream's number: libraries would write to it, and libuv
    would abort when it is closed.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the lowest free number
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def replace_unknown_characters(*streams: TextIO) -> None:
    """Make streams replace characters that their encoding lacks, instead of raising an error.

    A UTF-8 stream writes the bytes of a file name unchanged, also if they are not UTF-8.
    """
    for stream in streams:
        if not isinstance(stream, io.TextIOWrapper):
            continue
        is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
        if stream.errors == "strict" or (stream.errors == "surrogateescape" and not is_utf8):
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "replace")


_LIKENESS: Final = 0.7
"""Lowest ratio of difflib at which a message suggests an option."""


class _Once(argparse.Action):
    """Stores a value that is given once, such as the checkpoint as an argument or as a flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest, self.default) not in (self.default, values):
            flag = option_string or f"--{self.dest}"
            parser.error(f"{flag} is given twice with different values: give one")
        setattr(namespace, self.dest, values)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with a message of one line, without the usage, which would hide it."""
        command = commands().get(self.prog.rpartition(" ")[2])
        if command and command.example and ("required" in message or "unexpected" in message):
            message = f"{message}; for example: {command.example}"
        if "expected one argument" in message:
            message += "; a value that begins with - needs =: --flag=-value"
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help lists all)\n")


def _unknown_command(word: str) -> str:
    """Return the message about an unknown subcommand, with the nearest known one."""
    if os.path.exists(word) or "/" in word or word == "bundled":  # noqa: PTH110  any text
        served = f"`vitserve serve {word}` serves a checkpoint"
        return (
            f"{word!r} is not a command: {served}, `vitserve classify {word}` classifies pictures"
        )
    synonyms = [name for name, command in commands().items() if word.lower() in command.synonyms]
    near = "".join(synonyms[:1] or get_close_matches(word.lower(), commands(), 1))
    if near:
        return f"unknown command {word!r}: did you mean `vitserve {near}`?"
    return f"unknown command {word!r}; available: {', '.join(commands())}"


def _unknown_argument(command: str, argument: str, parser: argparse.ArgumentParser) -> str:
    """Return the message about an unknown argument of a subcommand, with the nearest options."""
    flag = argument.partition("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r}"
    options = _options(parser)
    synonyms = [option for option in _OPTIONS_MEANT.get(flag, ()) if option in options]
    longer = set()
    if flag.startswith("--"):
        longer = {option for option in options if option.startswith(flag)}
    near = [*synonyms, *sorted(longer)][:5] or get_close_matches(flag, options, 1, _LIKENESS)
    if near:
        return f"{flag} is not one of its options: did you mean {' or '.join(near)}?"
    others = [name for name in commands() if name != command and flag in _options(_parser(name)[1])]
    if others:
        return f"{flag} is not one of its options, but an option of {', '.join(others)}"
    return f"{flag} is not one of its options"


def _options(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a subcommand."""
    return re.findall(r"--[a-z][a-z0-9-]*", parser.format_usage())


def _parser(chosen: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of all subcommands, and the parser of the chosen subcommand's flags.

    Only the chosen subcommand's module is imported.
    """
    parser = _Parser(prog="vitserve", description="Serves a Vision Transformer over HTTP.")
    parser.add_argument("-V", "--version", action="version", version=f"vitserve {__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND")
    of_chosen: argparse.ArgumentParser = parser
    for name, command in commands().items():
        # A new option with the same beginning would change the meaning of an abbreviation.
        summary = command.summary.replace("%", "%%")
        subparser = subparsers.add_parser(name, help=summary, allow_abbrev=False)
        if name == chosen:
            of_chosen = subparser
            subparser.register("action", None, _Once)
            with _naming_outsider(name):
                _command(name).add_arguments(subparser)
    return parser, of_chosen


def _command(name: str) -> ModuleType:
    return importlib.import_module(commands()[name].module)


def _naming_outsider(name: str) -> AbstractContextManager[None]:
    """Name the extension in unexpected errors of a subcommand that another package adds."""
    if not commands()[name].module.startswith("service."):
        for extension in extensions():
            if name in extension.commands:
                return naming(extension, "commands")
    return nullcontext()
