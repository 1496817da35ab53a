"""Flags of the subcommands that ask a running server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TypeVar

import httpx

from model.errors import InputError
from service.settings import Settings
from vitserve.client import ClientError, Unauthorized, Unreachable

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")

_LOST_IN_A_ROW: Final = 8
"""Files without an answer, one after another, after which the server is taken for gone."""


def add_api_key_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--api-key`; `api_key_for` reads it."""
    parser.add_argument(
        "--api-key",
        default=os.environ.get("VIT_API_KEY"),
        help="key that the server asks for [VIT_API_KEY; for a server on this machine also the first of VIT_API_KEYS]",
    )


def api_key_for(url: str, given: str | None) -> str | None:
    """Return the key that was given, or else, for a server on this machine alone, the first of the server's keys."""
    candidates = [given or ""]
    if httpx.URL(url).host in ("127.0.0.1", "localhost", "::1"):
        candidates += os.environ.get("VIT_API_KEYS", "").split(",")
    return next((key.strip() for key in candidates if key.strip()), None)


@contextmanager
def asking(url: str) -> Iterator[None]:
    """Turn the errors of asking a server into an InputError, one line that says what to do about it."""
    if "://" not in url:
        raise InputError("url", f"{url}: expected an address such as http://{url}")
    try:
        yield
    except (httpx.InvalidURL, httpx.TransportError, ClientError) as error:
        message = str(error) if isinstance(error, Unreachable) else f"{url}: {error}"
        if isinstance(error, Unauthorized):
            message += ": give one of the server's keys with --api-key or VIT_API_KEY"
        elif isinstance(error, Unreachable | httpx.NetworkError | httpx.TimeoutException):
            message += ": is the server running?"
        raise InputError("url", message) from None


def while_reachable(answers: Iterable[tuple[_Item, _Answer]], count: int) -> Iterator[tuple[_Item, _Answer]]:
    """Yield files with their answers or errors, as long as the server is there.

    Args:
        count: of all files.

    Raises:
        ClientError: so many files in a row found no server that the others would only wait for it, too.
    """
    lost = 0
    for number, (item, answer) in enumerate(answers, start=1):
        lost = lost + 1 if isinstance(answer, Unreachable) else 0
        yield item, answer
        if lost == _LOST_IN_A_ROW and number < count:
            raise ClientError(f"no answer any more, {count - number} of {count} files were not asked about")


def local_url(environment: Mapping[str, str] = os.environ) -> str:
    """Return the address of a server that was started on this machine with the same environment."""
    return f"http://127.0.0.1:{environment.get('VIT_PORT') or Settings.model_fields['port'].default}"
