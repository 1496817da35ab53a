"""Stand-ins for the model: small, deterministic, and controllable without a sleep."""

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.config import LibraryConfig, PreprocessConfig, ViTConfig
from model.errors import DeviceError
from model.outputs import POOLINGS, AttentionMap, EmbeddingRequest, Outputs, RequestedOutputs
from service.engine.backbones import Checkpoint
from service.engine.engine import LocalEngine
from service.engine.interface import Engine
from service.engine.messages import BatchReport, InferenceRequest, InferenceResult, ModelInfo
from service.errors import EngineUnavailable, Forbidden
from service.models.all_models import Models
from service.models.local_model import LocalModel
from service.models.local_models import LocalModels
from service.models.override import Override
from service.models.version import Version
from service.settings import load_settings
from service.web.image_stores import MemoryImageStore
from tests.model.images.pictures import encode

HAS_CLUSTER = find_spec("service.extensions") is not None
"""Whether engines can have their own processes, which needs an extension."""

PATIENCE = 30.0
"""Seconds until a test gives up; correct code never waits this long."""

SIZE = 8
CLASSES = 10

BAD = 255
"""Red value of an image that the model fails on."""
NAN = 254
"""Red value of an image whose scores are NaN."""


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end, within `PATIENCE`."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds; look less often the longer it takes."""
    seconds = 0.001
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(seconds)
            seconds = min(1.2 * seconds, 0.05)


@contextmanager
def holding(version: Version[Any]) -> Iterator[None]:
    """A request that holds a version."""
    version.hold()
    try:
        yield
    finally:
        version.release()


def start(model: LocalModel, on_change: Callable[[], None]) -> None:
    """Begin to load a single model."""
    model.on_change = on_change
    model.current.engine.start(partial(model._changed, model.current, asyncio.Event()))


class FixedModels(Models):
    """Models of a test, which only the test changes."""

    def start(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change
        for model in self.served.values():
            assert isinstance(model, LocalModel)
            start(model, on_change)

    async def close(self) -> None:
        await asyncio.gather(
            *(
                model.versions.close_all()
                for model in self.served.values()
                if isinstance(model, LocalModel)
            )
        )

    async def load(self, name: str | None, caller: str = "") -> None:
        raise EngineUnavailable(self.served[self.key(name)].current.engine.status.reason)

    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        raise Forbidden("here models are not loaded")

    async def unload(self, name: str) -> None:
        self.require_changeable(name)
        await self.put(name, None)

    async def delete(self, name: str) -> None:
        await self.unload(name)

    async def _read_again(self) -> None:
        raise Forbidden("here models are not loaded")


LIBRARY = LibraryConfig(
    library="timm",
    architecture="convnext_atto",
    arguments={},
    fixed_size=False,
    image_size=(SIZE, SIZE),
    num_classes=CLASSES,
    width=8,
)
"""Return the description of a model that timm's code runs, without maps."""


def model_info(**changes: Any) -> ModelInfo:
    config = ViTConfig(
        image_size=(SIZE, SIZE),
        patch_size=4,
        width=8,
        depth=3,
        heads=2,
        mlp_width=16,
        num_classes=CLASSES,
    )
    preprocess = PreprocessConfig(
        size=(SIZE, SIZE),
        resize="squash",
        resize_size=(SIZE, SIZE),
        interpolation="nearest",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    values: dict[str, Any] = {
        "name": "fake",
        "source": "nowhere",
        "revision": None,
        "format": "fake",
        "architecture": "fake_vit",
        "parameters": 123,
        "config": config,
        "preprocess": preprocess,
        "labels": tuple(f"label {i}" for i in range(CLASSES)),
        "temperature": 1.0,
        "multi_label": False,
        "device": "cpu",
        "dtype": "float32",
        "backend": "fake 1.0",
        "max_batch": 4,
        "gpu_uuid": None,
        "content": "0123456789abcdef",
        "loaded_at": 1767225600,
    }
    return ModelInfo(**(values | changes))


def pixels(red: int) -> NDArray[np.uint8]:
    """Return a picture of the model's size that its red value identifies."""
    return np.full((SIZE, SIZE, 3), (red, 0, 0), np.uint8)


def png(red: int, size: tuple[int, int] = (SIZE, SIZE)) -> bytes:
    """Return this picture as a PNG file."""
    return encode(Image.new("RGB", size, (red, 0, 0)), "PNG")


def expected_indices(red: int, top_k: int) -> list[int]:
    """Return the scores of `FakePredictor` for `pixels(red)`."""
    return [(red + i) % CLASSES for i in range(top_k)]


def expected_logits(red: int) -> NDArray[np.float32]:
    """Return the logits of `FakePredictor` for `pixels(red)`."""
    return np.array([(red + i) / 4 for i in range(CLASSES)], np.float32)


def expected_embedding(red: int, requested: EmbeddingRequest) -> NDArray[np.float32]:
    """Return the embedding of `FakePredictor` for `pixels(red)`: pool, normalised or not, red."""
    return np.array(
        [POOLINGS.index(requested.pool), requested.normalize, red / 4, *range(5)], np.float32
    )


def text_feature(text: str) -> NDArray[np.float32]:
    """Return the feature of `FakePredictor` for a text: the counts of some letters."""
    return np.array([1 + text.count(letter) for letter in "abcdefgh"], np.float32)


def answer(red: int, top_k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    scores = np.array([0.5 / 2**i for i in range(top_k)], np.float32)
    return scores, np.array(expected_indices(red, top_k), np.int64)


@dataclass
class FakePredictor:
    """A predictor that answers by an image's red value.

    Every call waits for `gate` and is recorded in `launched`.
    """

    max_batch: int = 4
    streams: int = 1
    batch_sizes: tuple[int, ...] | None = None
    compiled: str = "off"
    device: str = "cpu"
    launched: list[list[int]] = field(default_factory=list)
    embedded: list[list[str]] = field(default_factory=list)
    warm_ups: int = 0
    device_is_dead: bool = False
    late_failure: Exception | None = None
    error: type[BaseException] = RuntimeError
    slow_embeddings: bool = False
    size: int = 1000
    heads: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def warm_up(self, *, compile_later: bool = False) -> None:
        self.warm_ups += 1

    def finish_warm_up(self) -> None:
        if self.late_failure is not None:
            raise self.late_failure

    def check(self) -> None:
        if self.device_is_dead:
            raise DeviceError(f"{self.device}: the model does not run")

    def defers(self, requested: RequestedOutputs) -> bool:
        return requested.embedding is not None and self.slow_embeddings

    def launch_size(self, count: int) -> int:
        return (
            count
            if self.batch_sizes is None
            else next(size for size in self.batch_sizes if size >= count)
        )

    def predict(
        self, images: Sequence[NDArray[np.uint8]], requests: Sequence[RequestedOutputs]
    ) -> list[Outputs]:
        reds = [int(np.asarray(image)[0, 0, 0]) for image in images]
        self.launched.append(reds)
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        if self.device_is_dead or BAD in reds:
            raise self.error("it does not compute")
        return [self._answer(red, requested) for red, requested in zip(reds, requests, strict=True)]

    def _answer(self, red: int, requested: RequestedOutputs) -> Outputs:
        found = None
        if requested.map is not None:
            found = AttentionMap(requested.map, np.full((2, 2), 0.25, np.float32), red / 256)
        logits = expected_logits(red) if requested.logits else None
        embedding = (
            None if requested.embedding is None else expected_embedding(red, requested.embedding)
        )
        return Outputs(*answer(red, requested.top_k), found, logits, embedding, finite=red != NAN)

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the counts of a text's letters as its feature."""
        self.embedded.append(list(texts))
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        if any("bad" in text for text in texts):
            raise RuntimeError("it does not compute")
        return np.stack([text_feature(text) for text in texts])

    async def wait_until_busy(self) -> None:
        """Wait until one more `predict` has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE)


def request_for(red: int, *, top_k: int = 3, **requested: Any) -> InferenceRequest:
    return InferenceRequest(pixels(red), RequestedOutputs(top_k, **requested))


@dataclass
class Rig:
    """A running engine with its listener's records; `close` closes it in its process."""

    models: Models
    close: Callable[[], Coroutine[Any, Any, None]]
    predictor: FakePredictor
    reports: list[BatchReport] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    @property
    def engine(self) -> Engine:
        return self.models.default.current.engine

    async def ask(
        self, red: int, *, timeout: float = PATIENCE, **requested: Any
    ) -> InferenceResult:
        return await self.engine.infer(request_for(red, **requested), timeout=timeout)

    def ask_soon(self, red: int, **options: Any) -> asyncio.Task[InferenceResult]:
        return asyncio.create_task(self.ask(red, **options))

    async def keep_busy(self, red: int = 0) -> asyncio.Task[InferenceResult]:
        """Close the gate and submit one image: later images wait until `predictor.gate.set()`."""
        self.predictor.gate.clear()
        task = self.ask_soon(red)
        await self.predictor.wait_until_busy()
        return task

    async def until_queued(self, count: int) -> None:
        await until(lambda: self.engine.status.queue_depth == count)

    async def until_ready(self) -> None:
        await until(lambda: self.engine.ready or self.engine.status.state == "failed")
        assert self.engine.ready, self.engine.status.reason

    async def until_state(self, state: str) -> None:
        await until(lambda: self.engine.status.state == state)


def local_models(make: Callable[[Any], Any], **overrides: Override) -> LocalModels:
    """Models of this process with engines that `make` returns; by default a single model."""
    return LocalModels(
        load_settings(), make, overrides={name.strip("_"): each for name, each in overrides.items()}
    )


@asynccontextmanager
async def running(
    predictor: FakePredictor | None = None,
    *,
    load: Callable[[], tuple[FakePredictor, ModelInfo]] | None = None,
    queue_size: int = 100,
    max_delay: float = 0.0,
    batch_seconds: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
    ready: bool = True,
    remote: bool = False,
) -> AsyncIterator[Rig]:
    """Start an engine with a fake predictor; `remote`: over a socket, as from another process."""
    predictor = predictor or FakePredictor()
    reports: list[BatchReport] = []
    states: list[str] = []
    engine = LocalEngine(
        load or (lambda: (predictor, model_info(max_batch=predictor.max_batch))),
        device="auto",
        queue_size=queue_size,
        max_delay=max_delay,
        batch_seconds=batch_seconds,
        on_batch=reports.append,
        clock=clock,
    )
    engine.last_used = None  # type: ignore[attr-defined]  # which engines of models have
    own = local_models(lambda _: engine)
    async with AsyncExitStack() as stack:
        if remote:
            folder = Path(stack.enter_context(TemporaryDirectory()))
            images = MemoryImageStore(ttl=60, max_bytes=1 << 20)
            from service.extensions.cluster.engine_client import EngineClient
            from service.extensions.cluster.engine_server import EngineServer
            from service.extensions.cluster.remote_model import RemoteModels
            from service.extensions.cluster.shared_pixels import SharedPixels, shared_memory

            shared = shared_memory(1)
            server = EngineServer(own, images, shared, refresh_seconds=0.01)
            slots = SharedPixels(shared, 0)
            other = RemoteModels([EngineClient(folder / "engine", "auto", slots)])
            rig = Rig(other, server.close, predictor, reports, states)
            await server.start(folder / "engine")
            stack.push_async_callback(other.close)
        else:
            rig = Rig(own, own.close, predictor, reports, states)

        def told() -> None:
            state = rig.engine.status.state
            if not states or states[-1] != state:
                states.append(state)

        rig.models.start(told)
        try:
            if ready:
                await rig.until_ready()
            yield rig
        finally:
            predictor.gate.set()
            await rig.close()
            await rig.until_state("failed" if "failed" in states else "closed")
