"""The host side of an engine process, with a device that only takes time: `python -m benchmarks.gpu
--device null`.

Frames, queue, streams, predictor and the copy to pinned memory are the service's own. The device
only sleeps, for one batch after another, at `--rate` images per second. This measures the path on
machines without a GPU.

Each measurement has an engine process on the first core, and 1 or 2 clients on the others. The
clients together keep 512 pictures of 224 pixels under way. The record has pictures/s, the mean
batch, and the processor's microseconds a picture: of the engine's event loop, of its other threads,
and of the clients.
"""

import argparse
import asyncio
import gc
import itertools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import uvloop

from benchmarks.processors import thread_seconds
from benchmarks.record import Record, command_line, table
from model.config import PreprocessConfig, ViTConfig
from model.description import Description
from model.images.preprocess import ModelInput, Region
from model.outputs import RequestedOutputs
from model.runtime.backend import Backend, HostOutputs, Images, Parts, TorchPasses
from model.runtime.batch_request import BatchRequest
from model.runtime.batch_sizes import captured_sizes
from model.runtime.predictor import Predictor
from service.engine.backbones import Backbones
from service.engine.messages import BatchReport, InferenceRequest, ModelInfo
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.engine_server import EngineServer
from service.extensions.cluster.remote_images import RemoteImageStore
from service.extensions.cluster.remote_model import RemoteModels
from service.extensions.cluster.shared_pixels import SharedPixels, shared_memory
from service.models.local_models import LocalModels
from service.process_memory import NEW_OBJECTS, bound_heaps
from service.settings import Settings, load_settings
from service.web.image_stores import MemoryImageStore, new_image_id

_TOP_K: Final = 5
_CLASSES: Final = 1000
# Number of classes that `Cuda` returns for each image.
_CAPTURED_TOP_K: Final = 32
_STREAMS: Final = 2
_UNDER_WAY: Final = 512
# A batch of fewer images takes as long as one of this size.
_SMALLEST: Final = 16
# Seconds before a measurement, in which all clients start.
_HEAD_START: Final = 1.5
# Clients of each measurement of a round.
_CLIENTS: Final = (1, 2)


class Null(Backend):
    """Computes nothing, at a rate of images per second; a rate of 0 takes no time."""

    name = "null"
    usual = (BatchRequest(),)

    def __init__(self, batch: int, shape: tuple[int, ...], rate: float) -> None:
        self.batch_sizes = captured_sizes(batch)
        self._rate = rate
        self._computing = threading.Lock()
        self._slots = [np.zeros((batch, *shape), np.uint8) for _ in range(_STREAMS)]

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        count = len(images)
        slot = self._slots.pop()
        np.stack(list(images), out=slot[:count])  # as the batch launcher does
        if self._rate:
            launched = next(size for size in self.batch_sizes or () if size >= count)
            with self._computing:
                time.sleep(max(launched, _SMALLEST) / self._rate)
        self._slots.append(slot)
        scores = np.zeros((count, _CAPTURED_TOP_K), np.float32)
        return {
            "scores": scores,
            "indices": scores.astype(np.int64),
            "finite": np.ones(count, bool),
        }

    def load_torch(self) -> TorchPasses:
        """Compute no maps."""
        raise NotImplementedError

    def compile(self) -> None:
        """Compile nothing."""
        return


class Load(NamedTuple):
    """One measurement: the number of client processes, and its seconds."""

    clients: int
    seconds: float


def load_null(settings: Settings, size: int, rate: float) -> tuple[Predictor, ModelInfo]:
    """Return a model of `size` pixels that runs on the null device, and its description."""
    config = ViTConfig(
        image_size=(size, size),
        patch_size=16,
        width=768,
        depth=12,
        heads=12,
        mlp_width=3072,
        num_classes=_CLASSES,
    )
    preprocess = PreprocessConfig(
        size=(size, size),
        resize="squash",
        resize_size=(size, size),
        interpolation="bilinear",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    labels = tuple(map(str, range(_CLASSES)))
    description = Description("null", "null", "null", "vit", config, preprocess, labels)
    batch = settings.max_batch or 128
    parts = Parts(
        "null", "bfloat16", None, 1, batch, _STREAMS, Null(batch, (size, size, 3), rate), "null"
    )
    info = ModelInfo(
        name="null",
        source="null",
        revision=None,
        format="null",
        architecture="vit",
        parameters=1,
        config=config,
        preprocess=preprocess,
        labels=labels,
        temperature=1.0,
        multi_label=False,
        device="null",
        dtype="bfloat16",
        backend="null",
        max_batch=batch,
        gpu_uuid=None,
    )
    return Predictor(description, parts), info


async def serve(
    path: Path, shared: memoryview, batches: Any, arguments: argparse.Namespace
) -> None:
    """Serve the null model at a socket until the process is killed; count images and batches."""
    settings = load_settings({"queue_size": 2 * _UNDER_WAY, "max_batch": arguments.batch})

    def count(report: BatchReport) -> None:
        batches[0] += report.size
        batches[1] += 1

    backbones = Backbones(
        settings, lambda own, _: load_null(own, arguments.size, arguments.rate), count
    )
    models = LocalModels(settings, backbones.engine)
    images = MemoryImageStore(ttl=60, max_bytes=settings.recent_bytes)
    await EngineServer(models, images, shared).start(path)
    await asyncio.Event().wait()


async def ask(
    path: Path, shared: SharedPixels, load: Load, arguments: argparse.Namespace, results: Any
) -> None:
    """Keep this client's share of the pictures in progress.

    `results` gets the answered pictures and the processor seconds of the measurement.
    """
    engine = EngineClient(path, "auto", shared)
    models = RemoteModels([engine])
    images = RemoteImageStore(engine)
    ready = asyncio.Event()
    models.start(lambda: ready.set() if models.default.current.engine.ready else None)
    await ready.wait()
    generator = np.random.default_rng(0)
    requested = RequestedOutputs(_TOP_K)
    shape = (arguments.size, arguments.size, 3)
    noise = [generator.integers(0, 256, shape, np.uint8) for _ in range(16)]
    region = Region(0, 0, *shape[:2])
    answered = 0

    async def one() -> None:
        nonlocal answered
        for pixels in itertools.cycle(noise):
            request = InferenceRequest(pixels, requested)
            await models.default.current.engine.infer(request, timeout=60)
            if arguments.keep:
                await images.put(ModelInput(pixels, region), new_image_id())
            answered += 1

    tasks = [asyncio.create_task(one()) for _ in range(_UNDER_WAY // load.clients)]
    await asyncio.sleep(_HEAD_START)
    began = time.process_time()
    before = answered
    await asyncio.sleep(load.seconds)
    results[0] = answered - before
    results[1] = time.process_time() - began
    for task in tasks:
        task.cancel()
    await asyncio.Event().wait()


def _run(core: int, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a process's part on one core, set up like the service's: see `service.process_memory`."""
    os.sched_setaffinity(0, {core})
    gc.set_threshold(NEW_OBJECTS)
    bound_heaps()
    uvloop.run(work())


def measure(load: Load, arguments: argparse.Namespace) -> dict[str, float]:
    """Start an engine and its clients, and return the figures that the module names."""
    fork = multiprocessing.get_context("fork")
    cores = sorted(os.sched_getaffinity(0))
    batches = fork.Array("d", 2, lock=False)
    results = [fork.Array("d", 2, lock=False) for _ in range(load.clients)]
    with tempfile.TemporaryDirectory(prefix="vitserve-null-") as folder:
        path = Path(folder) / "engine"
        shared = shared_memory(load.clients)
        engine = _started(fork, cores[0], lambda: serve(path, shared, batches, arguments))
        processes = [engine]
        try:
            while not path.exists():
                time.sleep(0.05)
            others = cores[1:] or cores
            for number, each in enumerate(results):
                core = others[number % len(others)]
                part = SharedPixels(shared, number)
                processes.append(
                    _started(fork, core, partial(ask, path, part, load, arguments, each))
                )
            time.sleep(_HEAD_START)
            before = thread_seconds(engine.pid or 0)
            images = batches[0]
            launched = batches[1]
            time.sleep(load.seconds)
            after = thread_seconds(engine.pid or 0)
            images = batches[0] - images
            launched = batches[1] - launched
            while not all(each[1] for each in results):
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.join()
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    loop = spent.pop(engine.pid or 0)
    answered = sum(each[0] for each in results)
    return {
        "pictures/s": round(answered / load.seconds, 1),
        "mean batch": round(images / launched, 1),
        "loop us": round(1e6 * loop / images, 1),
        "streams us": round(1e6 * sum(spent.values()) / images, 1),
        "client us": round(1e6 * sum(each[1] for each in results) / answered, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def _started(
    fork: ForkContext, core: int, work: Callable[[], Coroutine[Any, Any, None]]
) -> ForkProcess:
    process = fork.Process(target=_run, args=(core, work), daemon=True)
    process.start()
    return process


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line("null_device", (__doc__ or "").split("\n")[0], rounds=5, seconds=4)
    parser.add_argument(
        "--rate", type=float, default=12_075, help="images/s that the device computes; 0: no limit"
    )
    parser.add_argument("--batch", type=int, default=128, help="largest batch")
    parser.add_argument("--size", type=int, default=224, help="pixels of a picture's side")
    parser.add_argument("--clients", nargs="+", type=int, default=_CLIENTS, metavar="NUMBER")
    parser.add_argument(
        "--keep", action="store_true", help="keep the pictures, too, as POST /classify does"
    )
    parser.add_argument("--name", default="engine", help="section of the record")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, print, save."""
    arguments = parse(argv)
    record = Record(arguments.record, dtype="none", about={"about": (__doc__ or "").split("\n")[0]})
    section = f"{arguments.name}, {arguments.rate:g}/s"
    for _ in range(arguments.rounds):
        for clients in arguments.clients:
            name = f"{clients} clients"
            found = measure(Load(clients, arguments.seconds), arguments)
            record.note([*record.section(section).get(name, []), found], section, name)
    rounds: dict[str, list[dict[str, float]]] = record.section(section)
    columns = list(next(iter(rounds.values()))[0])
    medians = (
        [name, *(statistics.median(each[key] for each in found) for key in columns)]
        for name, found in rounds.items()
    )
    print(table(["medians", *columns], medians))
    return 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
