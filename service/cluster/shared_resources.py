"""What the processes of one service are made to share, before they are forked."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

from service.cluster.channel import EngineChannel
from service.cluster.shared_memory import SharedCounters, SharedFile
from service.errors import SettingsError
from service.settings import Settings

_PREFIX = "vitserve-metrics-"
_LOCK = "lock"


class Shared:
    """Sockets, memory and the folder of counters; inherited by every process of the service.

    Attributes:
        listeners: one a web worker, on the same address (SO_REUSEPORT): the kernel spreads connections evenly
            by their addresses, where workers that share one socket would take whole bursts each. This process
            keeps them open, so that connections that wait for a worker that dies are its successor's.
        links: one a device.
    """

    def __init__(self, settings: Settings) -> None:
        devices = settings.devices
        self.supervisor = os.getpid()
        self.listeners = listen(settings.host, settings.port, settings.workers)
        self.board = SharedCounters(workers=settings.workers, engines=len(devices), places=settings.queue_size)
        # Twice the places: a cancelled image's slot is free only when the engine has said so.
        slots = 2 * settings.queue_size
        self.links = [EngineChannel(index, device, self.board, slots=slots) for index, device in enumerate(devices)]
        self.recent = SharedFile("recent")
        self.counters = _private_folder()

    @property
    def port(self) -> int:
        """The port that is listened on; of use when 0 was asked for."""
        port: int = self.listeners[0].getsockname()[1]
        return port

    def stop_listening(self) -> None:
        """Let go of the listeners; the workers still have theirs."""
        for listener in self.listeners:
            listener.close()

    def close(self) -> None:
        """Remove what would stay behind."""
        self.stop_listening()
        for link in self.links:
            link.close()
        self.recent.close()
        self.board.close()
        shutil.rmtree(self.counters, ignore_errors=True)


def listen(host: str, port: int, count: int) -> list[socket.socket]:
    """`count` listening sockets on one address.

    Raises:
        OSError: the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listeners: list[socket.socket] = []
    for _ in range(count):
        listeners.append(socket.create_server((host, port), family=family, backlog=2048, reuse_port=True))
        port = listeners[0].getsockname()[1]
    return listeners


def _private_folder() -> Path:
    """A folder of this service's own for the files that its processes count in.

    It is locked as long as the service lives; those whose services were killed are removed here.

    Raises:
        SettingsError: there is no place for it.
    """
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise SettingsError(f"several processes need a folder for temporary files (TMPDIR): {error}") from None
    for left_behind in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # still in use, or removed by another
            _remove_unlocked(left_behind)
    made = Path(tempfile.mkdtemp(prefix="vitserve-"))
    descriptor = os.open(made / _LOCK, os.O_CREAT | os.O_RDONLY, 0o600)  # open until the last process ends
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    # Only now under the name that others look for.
    return made.rename(made.with_name(made.name.replace("vitserve-", _PREFIX)))


def _remove_unlocked(folder: Path) -> None:
    if folder.lstat().st_uid != os.getuid():  # anybody may put anything under this name
        return
    with (folder / _LOCK).open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
