"""Workers and engines in processes that are killed while pictures are under way.

Each answer is a checksum of all bytes that the engine read. The workers compare it with the bytes
that they sent.
"""

import asyncio
import mmap
import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
import uvloop
from numpy.typing import NDArray

from model.outputs import Outputs, RequestedOutputs
from service.engine.engine import LocalEngine
from service.engine.messages import InferenceRequest, ModelInfo
from service.errors import EngineUnavailable
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.engine_server import EngineServer
from service.extensions.cluster.remote_model import RemoteModels
from service.extensions.cluster.shared_pixels import PART_BYTES, SharedPixels, shared_memory
from service.models.local_models import LocalModels
from service.settings import load_settings
from service.web.image_stores import MemoryImageStore
from tests.service.fakes import FakePredictor, model_info

ENGINES: Final = 2
WORKERS: Final = 2
UNDER_WAY: Final = 24
SIDES: Final = (32, 96, 224)
# Room for some of the pictures, so that the others are sent through the socket.
BUFFER_BYTES: Final = 1_000_000


class Counts:
    """Counts that processes share: right answers of each worker, and wrong answers of all."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (WORKERS + 1))

    def __getitem__(self, index: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * index)[0])

    def add(self, index: int) -> None:
        struct.pack_into("q", self._memory, 8 * index, self[index] + 1)


def checksum(picture: NDArray[np.uint8]) -> int:
    return zlib.crc32(picture.tobytes())


class Checksums(FakePredictor):
    """A predictor that answers with the checksum of a picture."""

    def predict(self, images: Any, requests: Any) -> list[Outputs]:
        sums = [np.array([checksum(image)], np.int64) for image in images]
        return [Outputs(np.ones(1, np.float32), indices) for indices in sums]


class Address(NamedTuple):
    """How the workers of the service reach an engine."""

    path: Path
    memory: memoryview


async def serve(address: Address) -> None:
    def make(_: Any) -> Any:
        def load() -> tuple[FakePredictor, ModelInfo]:
            return Checksums(max_batch=8), model_info()

        engine = LocalEngine(
            load, device="cpu", queue_size=1000, max_delay=0, on_batch=lambda _: None
        )
        engine.last_used = None  # type: ignore[attr-defined]  # which engines of models have
        return engine

    images = MemoryImageStore(ttl=60, max_bytes=1 << 20)
    server = EngineServer(LocalModels(load_settings(), make), images, address.memory)
    await server.start(address.path)
    await asyncio.Event().wait()


async def ask(addresses: Sequence[Address], index: int, counts: Counts) -> None:
    engines = []
    for path, memory in addresses:
        part = SharedPixels(memory[: index * PART_BYTES + BUFFER_BYTES], index)
        engines.append(EngineClient(path, "cpu", part))
    models = RemoteModels(engines)
    models.start(lambda: None)
    random = np.random.default_rng(os.getpid())

    async def keep_asking(number: int) -> None:
        side = SIDES[number % len(SIDES)]
        while True:
            picture = random.integers(0, 256, (side, side, 3), np.uint8)
            request = InferenceRequest(picture, RequestedOutputs(1))
            answer = models.default.current.engine.infer(request, timeout=60)
            try:
                # A part of the callers leave, at any moment.
                async with asyncio.timeout(0.002 if number % 8 == 0 else 60):
                    result = await answer
            except TimeoutError:
                continue
            except EngineUnavailable:
                await asyncio.sleep(0.01)
                continue
            is_right = result.outputs.indices.tolist() == [checksum(picture)]
            counts.add(index if is_right else WORKERS)

    await asyncio.gather(*map(keep_asking, range(UNDER_WAY)))


def start(work: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Fork a process that does some work until it is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            uvloop.run(work())
        finally:
            os._exit(1)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def wrong_answers() -> int:
    """Kill each process several times, and return the number of wrong answers."""
    counts = Counts()

    def until_answered() -> None:
        """Wait until each worker has more answers."""
        wanted = [counts[index] + 100 for index in range(WORKERS)]
        while any(counts[index] < count for index, count in enumerate(wanted)):
            time.sleep(0.001)

    with TemporaryDirectory() as folder:
        addresses = [
            Address(Path(folder, str(index)), shared_memory(WORKERS)) for index in range(ENGINES)
        ]
        works = [partial(serve, address) for address in addresses]
        works += [partial(ask, addresses, index, counts) for index in range(WORKERS)]
        processes = [start(work) for work in works]
        for killed in [*range(len(works))] * 3:
            until_answered()
            kill(processes[killed])
            processes[killed] = start(works[killed])
        until_answered()
        for process in processes:
            kill(process)
    return counts[WORKERS]
