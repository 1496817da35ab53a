"""Access to the files of this machine: regular ones alone, and parts of a folder inside that
folder.

What libraries raise on a bad file becomes a `CheckpointError`: one line that names file and cause.

What the operator names, a folder or a single file, may be a symbolic link and is followed wherever
it leads. A part of a folder is read only where it lies below that folder once all links are
followed, as the files of a ConfigMap (`config.json -> ..data/config.json`) do. The cache of the
Hugging Face Hub is the one exception: its folders `models--owner--name/snapshots/REVISION` hold
links to `models--owner--name/blobs`.
"""

import codecs
import errno
import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from model.errors import CheckpointError, first_problem

# Of a JSON file or a file of labels: what is larger is another file.
_MAX_TEXT_BYTES: Final = 10 << 20
# Byte order marks that editors write, and what decodes a text after them; UTF-32's begins as
# UTF-16's.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

# Of a file or folder: its number, size and time of change in nanoseconds; None where there is
# nothing.
Signature = tuple[int, int, int] | None

_recorded: ContextVar[dict[Path, Signature] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[dict[Path, Signature]]:
    """Give all paths that are looked at in this context, absolute: of files, folders, and of
    nothing.

    While each leads to the same content, or to nothing still, the same call reads the same
    checkpoint.
    """
    paths: dict[Path, Signature] = {}
    token = _recorded.set(paths)
    try:
        yield paths
    finally:
        _recorded.reset(token)


def signature(path: Path) -> Signature:
    """Return the signature of a file or folder, which changes when it is written or replaced."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def resolved_source(path: Path, where: str) -> Path | None:
    """Return the folder or regular file that a path leads to, resolved, or None where it leads
    nowhere.

    Args:
        path: as the operator named it.
        where: what messages call it.

    Raises:
        CheckpointError: it is neither, or a folder on the way may not be read.
    """
    paths = _recorded.get()
    if paths is not None:
        paths.setdefault(path.absolute(), signature(path))
    with reading(where, "not a path", ValueError):
        try:
            resolved = Path(os.path.realpath(path, strict=True))
        except (FileNotFoundError, NotADirectoryError):
            return None
    if not resolved.is_dir() and not resolved.is_file():
        raise CheckpointError(f"{where}: a device, pipe or socket, expected a regular file")
    return resolved


def resolved_part(folder: Path, name: str, where: str) -> Path | None:
    """Return the resolved path of a regular file of a folder, or None where there is no such file.

    Args:
        folder: as the operator named it.
        name: of the file.
        where: what messages call the file.

    Raises:
        CheckpointError: it is no regular file, leads out of the folder, or this process may not
        read it.
    """
    path, root = (Path(os.path.realpath(path)) for path in (folder / name, folder))
    snapshots = next((above for above in root.parents if above.name == "snapshots"), root)
    blobs = snapshots.parent / "blobs"
    is_snapshot = snapshots != root and snapshots.parent.name.startswith("models--")
    # Looked at first, so that nobody learns what exists outside.
    if not path.is_relative_to(root) and not (is_snapshot and path.is_relative_to(blobs)):
        raise CheckpointError(
            f"{where}: a symbolic link out of its folder: put the file itself there"
        )
    resolved = resolved_source(folder / name, where)
    if resolved is not None and resolved.is_dir():
        raise CheckpointError(f"{where}: a folder, expected a regular file")
    return resolved


def open_file(path: Path, where: str) -> BufferedReader:
    """Return a regular file, open for reading; `CheckpointError` where there is none or it may not
    be read.
    """
    resolved = resolved_source(path, where)
    if resolved is None:
        raise CheckpointError(f"{where}: no such file")
    with reading(where):
        return resolved.open("rb")


def read_text_file(path: Path, where: str) -> str:
    """Return the text of a small file without its byte order mark; raises `CheckpointError` as
    `decoded`.
    """
    with open_file(path, where) as file, reading(where):
        data = file.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise CheckpointError(f"{where}: larger than {_MAX_TEXT_BYTES} bytes")
    return decoded(data, where)


def decoded(data: bytes, where: str) -> str:
    """Return a text without its byte order mark: UTF-8, or UTF-16 or UTF-32 whose mark says so.

    Raises:
        CheckpointError: it is in another encoding; UTF-16 without a mark is named.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")
    if encoding == "utf-8" and b"\0" in data[:4]:
        raise CheckpointError(
            f"{where}: UTF-16 without a byte order mark, or no text: save it as UTF-8"
        )
    refusal = f"not a {encoding.removesuffix('-sig').upper()} text file: save it as UTF-8"
    with reading(where, refusal, UnicodeDecodeError):
        return data.decode(encoding)


def read_json(path: Path, where: str) -> Any:
    """Return the JSON value in a small regular file; raises `CheckpointError` where there is none."""
    text = read_text_file(path, where)
    with reading(where, "not JSON", ValueError, RecursionError):
        return json.loads(text)


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
        is_damaged = (
            bool(malformed) and error.errno == errno.EINVAL
        )  # a library looked before the file's begin
        raise CheckpointError(
            f"{where}: {refusal if is_damaged else error.strerror or error}"
        ) from None
    except malformed as error:
        # The words of a parser of text say where; those of Python and of libraries say nothing to
        # an operator.
        place = (
            f": {error}"
            if isinstance(error, json.JSONDecodeError | tomllib.TOMLDecodeError)
            else ""
        )
        raise CheckpointError(f"{where}: {refusal}{place}") from None


@contextmanager
def validating(
    where: str, prefix: str = "", names: Mapping[str, str] | None = None
) -> Iterator[None]:
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
        raise CheckpointError(
            f"{where}: {prefix}{(names or {}).get(field, field)}{colon}{problem}"
        ) from None


def required(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a key.

    Raises:
        CheckpointError: the key is absent or null.
    """
    if mapping.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing")
    return mapping[key]
