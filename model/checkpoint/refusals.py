"""Conversion of libraries' errors on a bad file to a `CheckpointError`: one line that names file and cause."""

from __future__ import annotations

import errno
import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from model.errors import CheckpointError, first_problem


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
    except OSError as error:
        is_damaged = bool(malformed) and error.errno == errno.EINVAL  # a library looked before the file's begin
        raise CheckpointError(f"{where}: {refusal if is_damaged else error.strerror or error}") from None
    except malformed as error:
        # The words of a parser of text say where; those of Python and of libraries say nothing to an operator.
        place = f": {error}" if isinstance(error, json.JSONDecodeError | tomllib.TOMLDecodeError) else ""
        raise CheckpointError(f"{where}: {refusal}{place}") from None


@contextmanager
def validating(where: str, prefix: str = "", names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn a pydantic ValidationError into a CheckpointError.

    Args:
        where: what messages call the file.
        prefix: stands before the field's name.
        names: of fields in the file, where they are others.
    """
    try:
        yield
    except ValidationError as error:
        field, colon, problem = first_problem(error).partition(":")
        raise CheckpointError(f"{where}: {prefix}{(names or {}).get(field, field)}{colon}{problem}") from None


def required(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a key.

    Raises:
        CheckpointError: the key is absent or null.
    """
    if mapping.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing")
    return mapping[key]
