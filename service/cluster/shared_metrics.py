"""Gives each process of a service memory to count in, and all of them a folder of links to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from service.cluster.shared_memory import SharedFile
from service.errors import SettingsError
from service.metrics.metrics import files_of

_PREFIX = "vitserve-metrics-"
_LOCK = "lock"


class SharedMetrics:
    """Holds the files that each process counts in, made and filled before the processes are forked.

    They lie in memory that is taken here: a process that writes to a mapped file for which a full disk has no
    room is killed by the kernel. On the disk there are only links to them, by the names that are looked for.

    Args:
        processes: the names under which they count.

    Attributes:
        folder: where the links are. It is locked as long as the service lives; those whose services were killed are
            removed here.

    Raises:
        SettingsError: there is no place for the folder, or no memory for the files.
    """

    def __init__(self, processes: Iterable[str]) -> None:
        self.folder = _private_folder()
        self._files: list[SharedFile] = []
        try:
            for name, size in (item for process in processes for item in files_of(process).items()):
                file = SharedFile(name)
                self._files.append(file)
                file.reserve(size)
                (self.folder / name).symlink_to(file.path)
        except OSError as error:
            self.close()
            raise SettingsError(f"several processes need memory and a folder for their counters: {error}") from None

    def close(self) -> None:
        """Close the files, and remove the folder."""
        for file in self._files:
            file.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _private_folder() -> Path:
    """Return a new folder that is locked by this process and those that it forks."""
    try:
        parent = Path(tempfile.gettempdir())
        for left_behind in parent.glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError):  # still in use, or removed by another
                _remove_unlocked(left_behind)
        made = Path(tempfile.mkdtemp(prefix="vitserve-"))
        descriptor = os.open(made / _LOCK, os.O_CREAT | os.O_RDONLY, 0o600)  # open until the last process ends
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Only now under the name that others look for.
        return made.rename(made.with_name(made.name.replace("vitserve-", _PREFIX)))
    except OSError as error:
        raise SettingsError(f"several processes need a folder for temporary files (TMPDIR): {error}") from None


def _remove_unlocked(folder: Path) -> None:
    if folder.lstat().st_uid != os.getuid():  # anybody may put anything under this name
        return
    with (folder / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
