"""An open file of tensors: its bytes and the parts of a ZIP archive, within the memory that is free."""

from __future__ import annotations

import io
import lzma
import pickle
import re
import struct
import sys
import tokenize
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Final

import torch
from torch import Tensor

from model.errors import CheckpointError

MALFORMED: Final = (
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    MemoryError,
    ImportError,
    SyntaxError,
    pickle.PickleError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    tokenize.TokenError,
)
"""What is raised on damaged files, here and by the readers of the standard library, torch and NumPy."""

MAX_DIMENSIONS: Final = 8
_POINTER: Final = b"version https://git-lfs"
_MAX_DIRECTORY: Final = 4 << 20
"""Bytes of an archive's list of parts: of each, `zipfile` makes ten times as many."""
_MEMORY: Final = Path("/proc/meminfo")
_CONTROL_GROUP: Final = Path("/sys/fs/cgroup")
"""Of this process, as a container sees it."""
_UNLIMITED: Final = 64 << 30


class _Directory:
    """A file that gives `zipfile` no more at once than a list of parts may have, until that is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.limit = file, _MAX_DIRECTORY
        self.seek, self.tell, self.seekable = file.seek, file.tell, file.seekable

    def read(self, size: int = -1) -> bytes:
        if size > self.limit or size < 0:
            size = self.limit + 1
        data = self._file.read(size)
        if len(data) > self.limit:
            raise zipfile.BadZipFile(f"its list of parts has more than {self.limit} bytes")
        return data


def open_zip(file: BinaryIO) -> zipfile.ZipFile:
    """Return an archive whose list of parts is of bounded size."""
    directory = _Directory(file)
    archive = zipfile.ZipFile(directory)
    directory.limit = sys.maxsize - 1
    return archive


def stored_place(file: BinaryIO, info: zipfile.ZipInfo) -> int:
    """Return where the bytes of a part that is not packed begin."""
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.compress_size != info.file_size:
        raise ValueError(f"{info.filename!r:.100} is packed")
    file.seek(info.header_offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    return info.header_offset + 30 + int(name) + int(extra)


def read_bytes(file: BinaryIO, size: int) -> Tensor:
    """Return the next bytes of a file; EOFError where it has fewer, as one that is being written."""
    data = torch.empty(size, dtype=torch.uint8)
    view, done = data.numpy().data, 0
    while done < size:
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            raise EOFError("it ends early")
        done += count
    return data


def is_count(value: object) -> bool:
    """Return whether it is a number that may count something: products of longer ones take for ever."""
    return type(value) is int and 0 <= value < 1 << 60


def refuse_pointer(file: BinaryIO, where: str) -> None:
    """Refuse the few lines that Git LFS leaves in the place of a file that was not fetched."""
    if file.read(len(_POINTER)) == _POINTER:
        raise CheckpointError(f"{where}: a pointer of Git LFS and not the file itself: run git lfs pull beside it")
    file.seek(0)


def refuse_beyond_memory(file: BinaryIO, where: str) -> None:
    """Refuse a file that is larger than the memory that is free."""
    size, free = file.seek(0, io.SEEK_END), free_memory()
    if size > free:
        raise CheckpointError(f"{where}: has {size >> 20} MiB, {free >> 20} MiB of memory are free")
    file.seek(0)


def free_memory() -> int:
    """Return the bytes of memory that this process may still take: the machine's, or its control group's if fewer.

    Where the system does not say (it is not Linux), it is more than any file unpacks to.
    """
    free = [_UNLIMITED]
    with suppress(OSError):
        free += [
            int(kibibytes) << 10
            for kibibytes in re.findall(r"^MemAvailable:\s+(\d+)", _MEMORY.read_text(), re.MULTILINE)
        ]
    with suppress(OSError, ValueError):  # no limit is the word `max`
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        cached = re.findall(r"^inactive_file (\d+)", (_CONTROL_GROUP / "memory.stat").read_text(), re.MULTILINE)
        free.append(limit - int((_CONTROL_GROUP / "memory.current").read_text()) + sum(map(int, cached)))
    return max(min(free), 0)
