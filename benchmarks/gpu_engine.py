"""Measures an engine process: processes give it pixels, as web workers do, but decode nothing.

They map the memory that the service's processes share, which takes the right to open
/proc/PID/map_files. Without it, they send the pixels through the socket; the record says which.
"""

import asyncio
import itertools
import mmap
import multiprocessing
import re
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import uvloop

from benchmarks.processors import thread_seconds
from benchmarks.servers import Running
from model.outputs import RequestedOutputs
from service.engine.messages import InferenceRequest
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.remote_model import RemoteModels
from service.extensions.cluster.shared_pixels import PART_BYTES, SharedPixels

TOP_K: Final = 5

# Seconds between the start of the last client and the measurement.
_HEAD_START: Final = 0.5


class Address(NamedTuple):
    """How clients reach an engine.

    Attributes:
        socket: path of its socket.
        memory: file of its memory; None if it cannot be mapped.
    """

    socket: Path
    memory: Path | None

    def buffers(self, index: int) -> SharedPixels:
        """Return the buffers of a client, which takes those of the worker with its index."""
        if self.memory is None:
            return SharedPixels(memoryview(b""), 0)
        with self.memory.open("r+b") as file:
            return SharedPixels(memoryview(mmap.mmap(file.fileno(), 0)), index)


def shared_memory_of(process: int, workers: int) -> Path | None:
    """Return the file of the memory that a process shares with so many workers, if it opens."""
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        addresses = line.split()[0]
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if end - begin == workers * PART_BYTES and "/dev/zero" in line:
            path = Path(f"/proc/{process}/map_files/{addresses}")
            with suppress(PermissionError), path.open("r+b"):
                return path
    return None


class EngineProcess:
    """The engine process of a running service.

    Args:
        address: how to reach the engine.
        clients: default number of client processes.
        pictures: pictures that all clients together keep in progress.

    Attributes:
        used: the mean batch of the last measurement, and each engine thread's processor time in
            microseconds per picture, the busiest first, without those below one.
    """

    def __init__(self, server: Running, address: Address, clients: int, pictures: int) -> None:
        self.used: dict[str, Any] = {}
        self._server = server
        self._address = address
        self._clients = clients
        self._pictures = pictures

    def rate(self, seconds: float, clients: int | None = None) -> float:
        """Return the images per second that the engine answers."""
        threads = {process: thread_seconds(process) for process in self._server.pids()}
        images, batches = self._launched()
        rate = engine_rate(
            self._address,
            clients=clients or self._clients,
            pictures=self._pictures,
            seconds=seconds,
        )
        spent: list[list[float]] = []
        for process, before in threads.items():
            after = thread_seconds(process)
            spent.append([taken - before.get(thread, 0.0) for thread, taken in after.items()])
        images_after, batches_after = self._launched()
        images = images_after - images
        batches = batches_after - batches
        engine_threads = sorted(max(spent, key=sum), reverse=True)
        costs = [round(1e6 * taken / max(images, 1), 1) for taken in engine_threads]
        self.used = {
            "in shared memory": self._address.memory is not None,
            "mean batch": round(images / max(batches, 1), 1),
            "threads us": [cost for cost in costs if cost >= 1],
        }
        return rate

    def _launched(self) -> tuple[float, float]:
        """Return the numbers of images and batches that the engine has launched."""
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        names = ("vit_batch_size_sum", "vit_batch_size_count")
        images, batches = (
            sum(map(float, re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.M))) for name in names
        )
        return images, batches


def engine_rate(address: Address, *, clients: int, pictures: int, seconds: float) -> float:
    """Return the images per second that an engine answers to client processes.

    Args:
        pictures: pictures that all clients together keep in progress.
    """
    spawn = multiprocessing.get_context("spawn")
    share = -(-pictures // clients)
    with ProcessPoolExecutor(
        clients, spawn, initializer=_meet, initargs=(spawn.Barrier(clients),)
    ) as pool:
        running = [
            pool.submit(_run_client, address, index, share, seconds) for index in range(clients)
        ]
        return sum(client.result() for client in running) / seconds


def _meet(barrier: Barrier) -> None:
    barrier.wait()  # every process has imported this module


def _run_client(address: Address, index: int, pictures: int, seconds: float) -> int:
    return uvloop.run(_client(address, index, pictures, seconds))


async def _client(address: Address, index: int, pictures: int, seconds: float) -> int:
    """Keep pictures in progress until the end; return the number of answers within the seconds."""
    begin = time.monotonic() + _HEAD_START
    end = begin + seconds
    models = RemoteModels([EngineClient(address.socket, "auto", address.buffers(index))])
    connected = asyncio.Event()
    models.start(lambda: connected.set() if models.default.current.engine.ready else None)
    await connected.wait()
    engine = models.default.current.engine
    assert engine.info is not None, "it is ready"
    noise = np.random.default_rng(0)
    shape = engine.info.input_shape
    outputs = RequestedOutputs(min(TOP_K, engine.info.config.num_classes))
    requests = [
        InferenceRequest(noise.integers(0, 256, shape, np.uint8), outputs) for _ in range(16)
    ]
    turn = itertools.cycle(requests)
    answered = 0

    async def keep_one() -> None:
        nonlocal answered
        while time.monotonic() < end:
            await engine.infer(next(turn), timeout=60)
            if begin <= time.monotonic() < end:
                answered += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(pictures):
            group.create_task(keep_one())
    await models.close()
    return answered
