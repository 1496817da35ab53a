"""Access to the files of this machine: regular ones alone, inside the folder that was named, of bounded size.

What the operator names, a folder or a single file, may be a symbolic link and is followed wherever it leads. A part
of a folder is read only where it lies below that folder once all links are followed, as the files of a ConfigMap
(`config.json -> ..data/config.json`) do. The cache of the Hugging Face Hub is the one exception: its folders
`models--owner--name/snapshots/REVISION` hold links to `models--owner--name/blobs`.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, BinaryIO, Final

from model.checkpoint.refusals import reading
from model.errors import CheckpointError

MAX_TEXT_BYTES: Final = 10 << 20
"""Of a JSON file or a file of labels: as Python's objects, JSON takes up to 100 times its bytes."""
MAX_NESTING: Final = 50
"""Levels of a JSON value."""

_KINDS: Final = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


Signature = tuple[int, int, int] | None
"""Of a file or folder: its number, size and time of change in nanoseconds; None where there is nothing."""

_recorded: ContextVar[dict[Path, Signature] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[dict[Path, Signature]]:
    """Give all paths that are looked at in this context, absolute: of files, folders, and of nothing.

    While each leads to the same content, or to nothing still, the same call reads the same checkpoint.
    """
    paths: dict[Path, Signature] = {}
    token = _recorded.set(paths)
    try:
        yield paths
    finally:
        _recorded.reset(token)


def signature(path: Path) -> Signature:
    """Return what tells whether a file or folder was changed or replaced."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def resolved_source(path: Path, where: str) -> Path | None:
    """Return the folder or regular file that a path leads to, resolved, or None where it leads nowhere.

    Args:
        path: as the operator named it.
        where: what messages call it.

    Raises:
        CheckpointError: it is neither, or this process may not read it.
    """
    resolved = _resolved(path, where)
    if resolved is None:
        return None
    if resolved.is_dir():
        if not os.access(resolved, os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            raise _unreadable(resolved, where)
        return resolved
    return _regular(resolved, where)


def resolved_part(folder: Path, name: str, where: str) -> Path | None:
    """Return the resolved path of a regular file of a folder, or None where there is no such file.

    Args:
        folder: as the operator named it.
        name: of the file.
        where: what messages call the file.

    Raises:
        CheckpointError: it is no regular file, leads out of the folder, or this process may not read it.
    """
    path, root = (Path(os.path.realpath(path)) for path in (folder / name, folder))
    blobs = root.parent.parent / "blobs"
    is_snapshot = root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--")
    # Looked at first, so that nobody learns what exists outside.
    if not path.is_relative_to(root) and not (is_snapshot and path.is_relative_to(blobs)):
        raise CheckpointError(f"{where}: a symbolic link out of its folder: put the file itself there")
    resolved = _resolved(folder / name, where)
    return resolved and _regular(resolved, where)


def read_text_file(path: Path, where: str) -> bytes:
    """Return the bytes of a regular file of at most `MAX_TEXT_BYTES`.

    Raises:
        CheckpointError: there is none, it is no regular file, larger, or may not be read.
    """
    with open_file(path, where) as file, reading(where):
        data = file.read(MAX_TEXT_BYTES + 1)
    if len(data) > MAX_TEXT_BYTES:
        raise CheckpointError(f"{where}: larger than {MAX_TEXT_BYTES} bytes")
    return data


def open_file(path: Path, where: str) -> BinaryIO:
    """Return a regular file, open for reading.

    Raises:
        CheckpointError: there is none, it is no regular file, or may not be read.
    """
    resolved = _resolved(path, where)
    if resolved is None:
        raise CheckpointError(f"{where}: no such file")
    return os.fdopen(_opened(resolved, where), "rb")


def read_json(path: Path, where: str | None = None) -> Any:
    """Return the JSON value in a regular file of at most `MAX_TEXT_BYTES`; CheckpointError where there is none."""
    where = where or str(path)
    return parse_json(read_text_file(path, where), where)


def parse_json(data: bytes, where: str) -> Any:
    """Return the value of a text in JSON.

    Raises:
        CheckpointError: it is none, has the same key twice in an object, or more than `MAX_NESTING` levels.
    """
    with reading(where, "not JSON", ValueError, RecursionError):
        value = json.loads(data, object_pairs_hook=_once)
    level, inner = 0, [value]
    while inner:
        level += 1
        inner = [
            part
            for whole in inner
            if isinstance(whole, dict | list)
            for part in (whole.values() if isinstance(whole, dict) else whole)
        ]
    if level > MAX_NESTING:
        raise CheckpointError(f"{where}: not JSON of a checkpoint: {level} levels, at most {MAX_NESTING} are read")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"{twice!r:.100} stands twice in one object")
    return value


def _resolved(path: Path, where: str) -> Path | None:
    paths = _recorded.get()
    if paths is not None:
        paths.setdefault(path.absolute(), signature(path))
    try:
        return Path(os.path.realpath(path, strict=True))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise _unreadable(path, where) from None
    except (OSError, ValueError) as error:  # links in a circle, a name that is too long; a null byte
        raise CheckpointError(f"{where}: {getattr(error, 'strerror', None) or error}") from None


def _regular(path: Path, where: str) -> Path:
    """Return a resolved path once it is known to be a regular file that can be opened."""
    os.close(_opened(path, where))
    return path


def _opened(path: Path, where: str) -> int:
    """Return a descriptor of the regular file at a resolved path."""
    with reading(where):
        mode = path.lstat().st_mode  # a device may do something when it is opened
        if stat.S_ISREG(mode):
            try:
                # Meanwhile it may have become a link or a pipe: neither is followed or waited for.
                descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except PermissionError:
                raise _unreadable(path, where) from None
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                return descriptor
            os.close(descriptor)
    kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a special file")
    raise CheckpointError(f"{where}: {kind}, expected a regular file")


def _unreadable(path: Path, where: str) -> CheckpointError:
    """Return the error for a path that this process may not read; it names the first folder that bars the way."""
    path = Path(os.path.realpath(path))
    barring = next((place.parent for place in (*reversed(path.parents), path) if not _is_seen(place)), None)
    if barring is None and path.is_dir():
        barring = path
    change = f"a+r {path}" if barring is None else f"a+rx {barring}"
    return CheckpointError(f"{where} cannot be read by uid {os.geteuid()}: chmod {change}")


def _is_seen(path: Path) -> bool:
    try:
        path.lstat()
    except PermissionError:
        return False
    return True
