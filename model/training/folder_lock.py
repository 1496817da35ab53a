"""A lock that allows one run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from model.errors import TrainingError


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; the kernel lets go of it however the process ends.

    The folder itself is locked, so that no file is left behind.

    Raises:
        TrainingError: another process holds it, or its file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{folder}: another run is writing here; wait, or choose another folder") from None
        except OSError as error:
            raise TrainingError(f"{folder}: cannot be locked: {error.strerror}") from error
        yield
    finally:
        os.close(descriptor)
