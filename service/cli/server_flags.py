"""Flags and errors of the subcommands that send requests to a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import httpx

from model.errors import InputError
from vitserve.client import Client, ClientError, Unauthorized, Unreachable

_Answer = TypeVar("_Answer")

_LOST_IN_A_ROW: Final = 8
"""Consecutive files without an answer after which the server is taken for gone."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, which a command without it does without, and `--api-key`; `client_of` reads both."""
    parser.add_argument("--url", help="ask this server instead of loading the model here")
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VIT_API_KEY"),
        help="key of the server, without its name [VIT_API_KEY]",
    )


@contextmanager
def client_of(arguments: argparse.Namespace) -> Iterator[Client]:
    """Give a client of the server at `--url`; its errors become an InputError of one line that says what to do."""
    url: str = arguments.url
    if "://" not in url:
        raise InputError("url", f"{url}: expected an address such as http://{url}")
    try:
        with Client(url, api_key=(arguments.api_key or "").strip() or None) as client:
            yield client
    except Unreachable as error:
        raise InputError("url", f"{error}: is the server running?") from None
    except (httpx.InvalidURL, ClientError) as error:
        key = ": give one of the server's keys with --api-key or VIT_API_KEY" if isinstance(error, Unauthorized) else ""
        raise InputError("url", f"{url}: {error}{key}") from None


def stream_answers(
    files: Sequence[Path], client: Client, ask: Callable[[Path], _Answer], *, concurrency: int = 8
) -> Iterator[tuple[Path, _Answer | str]]:
    """Yield each file with its answer, or with why it has none, as long as the server answers.

    Raises:
        ClientError: `_LOST_IN_A_ROW` consecutive files got no answer; the others would only wait.
    """
    lost = 0
    for number, (file, answer) in enumerate(client.stream(files, ask, concurrency=concurrency), start=1):
        lost = lost + 1 if isinstance(answer, Unreachable) else 0
        yield file, str(answer) if isinstance(answer, ClientError | OSError) else answer
        if lost == _LOST_IN_A_ROW and number < len(files):
            left = len(files) - number
            raise ClientError(f"no answer any more, {left} of {len(files)} files were not asked about")
