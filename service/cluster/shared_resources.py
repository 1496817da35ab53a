"""Makes the resources that the processes of one service share, before they are forked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterable
from pathlib import Path

from service.cluster.channel import EngineChannel
from service.cluster.shared_memory import SharedCounters, SharedFile
from service.cluster.swap_board import GROUPS, SwapBoard
from service.errors import SettingsError
from service.http.listening import address_family
from service.observe.metrics import files_of
from service.settings import Settings

_PREFIX = "vitserve-metrics-"
_LOCK = "lock"

_LARGEST_FILE = 256 << 20
"""Bytes that are enough for the pictures of a model's size that a worker and an engine share."""


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


class SharedResources:
    """Holds the sockets, the memory and the metrics' folder that every process of the service inherits.

    Attributes:
        listeners: for each web worker, on the same address (SO_REUSEPORT): the kernel spreads connections evenly
            by their addresses, where workers that share one socket would take whole bursts each. This process
            keeps them open, so that connections that wait for a worker that dies are its successor's.
        groups: the engines' channels, by device; while a checkpoint is swapped, the engines of both groups run. Each
            group has counters of its own, of which the engines and their images are written.
        counters, channels: those of the first group. Its counters have the workers' cells, too.
        board: by which the checkpoint is swapped.
        port: the port that is listened on, which the system chose if the settings say 0.
        listening: whether this process still holds the listeners.
        image_file: memory for the pictures that are kept for GET /attention.
        metrics: memory in which each process counts.

    Raises:
        SettingsError: the system allows no files that are large enough, or no folder or memory for the counters.
    """

    def __init__(self, settings: Settings) -> None:
        _check_file_size(max(settings.recent_bytes, _LARGEST_FILE))
        devices = settings.devices
        self.supervisor = os.getpid()
        self.listeners = listen(settings.host, settings.port, settings.workers)
        self.port: int = self.listeners[0].getsockname()[1]
        self.listening = True
        # Twice the permits: a cancelled image's slot is free only when the engine has said so.
        slots = 2 * settings.queue_size
        self.groups: list[list[EngineChannel]] = []
        for _ in range(GROUPS):
            counters = SharedCounters(
                workers=settings.workers,
                engines=len(devices),
                capacity=settings.queue_size,
                keys=len(settings.api_keys),
            )
            channels = [EngineChannel(index, device, counters, slots=slots) for index, device in enumerate(devices)]
            self.groups.append(channels)
            counters.restarts = self.groups[0][0].counters.restarts  # a device's, whichever group serves
        self.channels = self.groups[0]
        self.counters = self.channels[0].counters
        self.board = SwapBoard(settings.checkpoint, workers=settings.workers)
        self.image_file = SharedFile("images")
        workers = [f"worker-{index}" for index in range(settings.workers)]
        self.metrics = SharedMetrics([*workers, *(f"engine-{index}" for index in range(GROUPS * len(devices)))])

    def stop_listening(self) -> None:
        """Close this process's listeners; the workers still have theirs."""
        self.listening = False
        for listener in self.listeners:
            listener.close()

    def close(self) -> None:
        """Close listeners, channels and files."""
        self.stop_listening()
        for channels in self.groups:
            channels[0].counters.close()
            for channel in channels:
                channel.close()
        self.image_file.close()
        self.metrics.close()


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """Return `count` listening sockets on one address; raises `OSError` when it cannot be had."""
    family = address_family(host)
    listeners: list[socket.socket] = []
    for _ in range(count):
        listeners.append(socket.create_server((host, port), family=family, backlog=2048, reuse_port=True))
        port = listeners[0].getsockname()[1]
    return listeners


def _check_file_size(size: int) -> None:
    """Check that files may have `size` bytes, which holds for shared memory too; raises `SettingsError` if not."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < size:
        raise SettingsError(
            f"several processes share memory in files of up to {size} bytes, and this system's limit is {limit} "
            "(ulimit -f, RLIMIT_FSIZE)"
        )


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
