"""Access to the files of this machine: only regular files, and a folder's files only inside it.

The errors of libraries on a bad file become a `CheckpointError`: one line that names the file and
the cause.

The folder or file that the operator names may be a symbolic link, which is followed wherever it
leads. A file of a folder is read only if it is below that folder once all links are followed, as
the files of a ConfigMap are (`config.json -> ..data/config.json`). The only exception is the cache
of the Hugging Face Hub: its folders `models--owner--name/snapshots/REVISION` hold links to
`models--owner--name/blobs`.
"""

import codecs
import errno
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from model.errors import CheckpointError, first_problem

# Limit for a JSON file or a file of labels. A larger file is probably something else.
_MAX_TEXT_BYTES: Final = 10 << 20
# Byte order marks that editors write, and the codecs that decode a text after them. UTF-32's mark
# begins with UTF-16's.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_POINTER: Final = b"version https://git-lfs"

# Inode, size and time of change in nanoseconds of a file or folder; None if it does not exist.
Signature = tuple[int, int, int] | None

_recorded: ContextVar[dict[Path, Signature] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[dict[Path, Signature]]:
    """Record the absolute paths of all files and folders that are looked at in this context.

    While their signatures stay the same, the same call reads the same checkpoint.
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
    """Return the resolved path of a folder or regular file, or None if it does not exist.

    Args:
        path: path as the operator wrote it.
        where: name of the path in messages.

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
    """Return the resolved path of a regular file of a folder, or None if it does not exist.

    Args:
        folder: path of the folder as the operator wrote it.
        name: name of the file.
        where: name of the file in messages.

    Raises:
        CheckpointError: it is not a regular file, leads out of the folder, or this process may not
            read it.
    """
    path = Path(os.path.realpath(folder / name))
    root = Path(os.path.realpath(folder))
    # This check comes first, so that a link does not reveal which files exist outside.
    if not path.is_relative_to(root) and not _is_cached_blob(path, root):
        raise CheckpointError(
            f"{where}: a symbolic link out of its folder: put the file itself there"
        )
    resolved = resolved_source(folder / name, where)
    if resolved is not None and resolved.is_dir():
        raise CheckpointError(f"{where}: a folder, expected a regular file")
    return resolved


def _is_cached_blob(path: Path, root: Path) -> bool:
    """Return whether a path is a blob of the hub's cache, to which the snapshot `root` belongs."""
    snapshots = next((folder for folder in root.parents if folder.name == "snapshots"), None)
    if snapshots is None or not snapshots.parent.name.startswith("models--"):
        return False
    return path.is_relative_to(snapshots.parent / "blobs")


def open_file(path: Path, where: str) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        CheckpointError: the file does not exist, may not be read, is a folder, is empty, or is a
            pointer of Git LFS.
    """
    resolved = resolved_source(path, where)
    if resolved is None:
        raise CheckpointError(f"{where}: no such file")
    if resolved.is_dir():
        raise CheckpointError(f"{where}: a folder, expected a file")
    with reading(where):
        file = resolved.open("rb")
        start = file.peek(len(_POINTER))
    if not start.startswith(_POINTER) and start:
        return file
    file.close()
    if start:
        raise CheckpointError(
            f"{where}: a pointer of Git LFS and not the file itself: run git lfs pull in its folder"
        )
    raise CheckpointError(f"{where}: an empty file: copy or download it again")


def read_text_file(path: Path, where: str) -> str:
    """Return the text of a small file without its byte order mark; raise errors as `decoded`."""
    with open_file(path, where) as file, reading(where):
        data = file.read(_MAX_TEXT_BYTES + 1)
    if len(data) > _MAX_TEXT_BYTES:
        raise CheckpointError(f"{where}: larger than {_MAX_TEXT_BYTES} bytes")
    return decoded(data, where)


def decoded(data: bytes, where: str) -> str:
    """Return a text without its byte order mark: UTF-8, or UTF-16 or UTF-32 with a mark.

    Raises:
        CheckpointError: the text has another encoding.
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
    """Return the JSON value in a small file; raise `CheckpointError` if it cannot be read."""
    return parsed_json(read_text_file(path, where), where)


def parsed_json(text: str, where: str) -> Any:
    """Return the value of a JSON text; raise `CheckpointError` if it cannot be read."""
    with reading(where, "not JSON", ValueError, RecursionError):
        return json.loads(text, object_pairs_hook=partial(unique_keys, where=where))


def unique_keys(pairs: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    """Return an object; refuse a repeated key, because `dict` keeps only its last value."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise CheckpointError(
                f"{where}: {key!r:.100} is there twice: {result[key]!r:.100} and {value!r:.100}: "
                "remove the wrong one"
            )
        result[key] = value
    return result


@contextmanager
def reading(where: str, refusal: str = "", *malformed: type[Exception]) -> Iterator[None]:
    """Turn errors while a file is read into a CheckpointError.

    Args:
        where: name of the file in messages.
        refusal: message about malformed content, such as `not JSON`.
        malformed: exceptions of the library for malformed content.
    """
    try:
        yield
    except OSError as error:
        # A library seeks a negative position: the file is shorter than its format promises.
        is_damaged = bool(malformed) and error.errno == errno.EINVAL
        raise CheckpointError(
            f"{where}: {refusal if is_damaged else error.strerror or error}"
        ) from None
    except malformed as error:
        # A text parser's message gives the line. Others would not help an operator.
        has_line = isinstance(error, json.JSONDecodeError | tomllib.TOMLDecodeError)
        detail = f": {error}" if has_line else ""
        raise CheckpointError(f"{where}: {refusal}{detail}") from None


@contextmanager
def advising(advice: str) -> Iterator[None]:
    """Add advice to the message of a CheckpointError."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{error}{advice}") from None


@contextmanager
def validating(
    where: str, prefix: str = "", names: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Turn a pydantic ValidationError into a CheckpointError.

    Args:
        where: name of the file in messages.
        prefix: text before the field's name.
        names: the file's names of fields, if they differ.
    """
    try:
        yield
    except ValidationError as error:
        field, colon, problem = first_problem(error).partition(":")
        name = (names or {}).get(field, field)
        raise CheckpointError(f"{where}: {prefix}{name}{colon}{problem}") from None


def required(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    """Return the value of a key.

    Raises:
        CheckpointError: the key is absent or null.
    """
    if mapping.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing: add it to the file")
    return mapping[key]
