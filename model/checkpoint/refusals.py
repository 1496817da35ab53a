"""Conversion of libraries' errors on a bad file to a `CheckpointError`: one line that names file and cause."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from pydantic import ValidationError

from model.errors import CheckpointError, first_line, first_problem

MAX_TENSORS: Final = 10_000
MAX_NAME: Final = 1000
MAX_PARTS: Final = 32
"""Of a tensor's name: what stands between its dots."""


@contextmanager
def reading(where: str, refusal: str = "", *malformed: type[Exception]) -> Iterator[None]:
    """Turn errors that are raised while a file is read into a CheckpointError.

    Args:
        where: what messages call the file.
        refusal: what messages say of malformed content, e.g. `not JSON`.
        malformed: what the library raises on malformed content.
    """
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{where}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{where}: {error.strerror or error}") from None
    except malformed as error:
        raise CheckpointError(f"{where}: {refusal}: {first_line(error)}") from None


@contextmanager
def validating(where: str, prefix: str = "") -> Iterator[None]:
    """Turn a pydantic ValidationError into a CheckpointError; `prefix` stands before the field's name."""
    try:
        yield
    except ValidationError as error:
        raise CheckpointError(f"{where}: {prefix}{first_problem(error)}") from None


def required(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a key.

    Raises:
        CheckpointError: the key is absent or null.
    """
    if mapping.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing")
    return mapping[key]


def first_and_count(names: list[str]) -> str:
    """Return the first of some sorted names, quoted, and how many more there are."""
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def check_names(names: Collection[str], where: str) -> None:
    """Refuse more names of tensors, or longer ones, than any network has: what looks at them takes ever longer.

    Raises:
        CheckpointError: more than `MAX_TENSORS`, a name of more than `MAX_NAME` characters or `MAX_PARTS` parts.
    """
    if len(names) > MAX_TENSORS:
        raise CheckpointError(f"{where}: {len(names)} tensors are more than {MAX_TENSORS}")
    for name in names:
        if len(name) > MAX_NAME or name.count(".") >= MAX_PARTS:
            raise CheckpointError(
                f"{where}: {name!r:.100}… has {len(name)} characters in {name.count('.') + 1} parts: names of tensors "
                f"have at most {MAX_NAME} in {MAX_PARTS}"
            )
