"""Makes the resources that the processes of one service share, before they are forked."""

from __future__ import annotations

import os
import resource
import socket
from dataclasses import dataclass

from service.cluster.channel import EngineChannel
from service.cluster.shared_memory import SharedCounters, SharedFile
from service.cluster.shared_metrics import SharedMetrics
from service.cluster.swap_board import GROUPS, SwapBoard
from service.errors import SettingsError
from service.http.listening import address_family
from service.settings import Settings

_LARGEST_FILE = 256 << 20
"""Bytes that are enough for the pictures of a model's size that a worker and an engine share."""


@dataclass(frozen=True)
class EngineGroup:
    """The engines of a generation, each for a device.

    Attributes:
        counters: those cells of which the engines and their images are written.
    """

    counters: SharedCounters
    channels: list[EngineChannel]


class SharedResources:
    """Holds the sockets, the memory and the metrics' folder that every process of the service inherits.

    Attributes:
        listeners: for each web worker, on the same address (SO_REUSEPORT): the kernel spreads connections evenly
            by their addresses, where workers that share one socket would take whole bursts each. This process
            keeps them open, so that connections that wait for a worker that dies are its successor's.
        groups: of engines; while a checkpoint is swapped, the engines of both run.
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
        self.groups: list[EngineGroup] = []
        for _ in range(GROUPS):
            counters = SharedCounters(
                workers=settings.workers,
                engines=len(devices),
                capacity=settings.queue_size,
                keys=len(settings.api_keys),
            )
            channels = [EngineChannel(index, device, counters, slots=slots) for index, device in enumerate(devices)]
            self.groups.append(EngineGroup(counters, channels))
            counters.restarts = self.groups[0].counters.restarts  # a device's, whichever group serves
        self.counters, self.channels = self.groups[0].counters, self.groups[0].channels
        self.board = SwapBoard(settings.checkpoint, workers=settings.workers)
        self.image_file = SharedFile("images")
        self.metrics = SharedMetrics(workers=settings.workers, engines=GROUPS * len(devices))

    def stop_listening(self) -> None:
        """Close this process's listeners; the workers still have theirs."""
        self.listening = False
        for listener in self.listeners:
            listener.close()

    def close(self) -> None:
        """Close listeners, channels and files."""
        self.stop_listening()
        for group in self.groups:
            for channel in group.channels:
                channel.close()
            group.counters.close()
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
