"""Stand-ins for the model and for HTTP: small, deterministic, and controllable without a sleep."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.config import PreprocessConfig, ViTConfig
from model.errors import DeviceError
from model.prediction import AttentionMap, BatchPrediction, MapRequest
from service.cluster.channel import EngineChannel
from service.cluster.engine_server import EngineServer
from service.cluster.remote_engine import RemoteEngine
from service.cluster.shared_memory import SharedCounters
from service.engine.base import Engine
from service.engine.local import LocalEngine
from service.engine.messages import BatchReport, EngineStatus, InferenceRequest, InferenceResult, ModelInfo
from service.errors import ServiceError

PATIENCE = 30.0
"""Seconds after which a test gives up; nothing ever waits this long when the code is right."""

SIZE = 8
CLASSES = 10

BAD = 255
"""Red value of an image that the model fails on."""
NAN = 254
"""Red value of an image whose scores are no numbers."""


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test to its end, within `PATIENCE`."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


def model_info(**changes: Any) -> ModelInfo:
    config = ViTConfig(
        image_size=(SIZE, SIZE), patch_size=4, width=8, depth=3, heads=2, mlp_width=16, num_classes=CLASSES
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
    }
    return ModelInfo(**(values | changes))


def pixels(red: int) -> NDArray[np.uint8]:
    """A picture of the model's size that is recognised by its red value."""
    return np.full((SIZE, SIZE, 3), (red, 0, 0), np.uint8)


def png(red: int, size: tuple[int, int] = (SIZE, SIZE)) -> bytes:
    """The same as a file."""
    buffer = io.BytesIO()
    Image.new("RGB", size, (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def expected_indices(red: int, top_k: int) -> list[int]:
    """What `FakePredictor` answers for `pixels(red)`."""
    return [(red + i) % CLASSES for i in range(top_k)]


def answer(red: int, top_k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    scores = np.array([0.5 / 2**i for i in range(top_k)], np.float32)
    return scores, np.array(expected_indices(red, top_k), np.int64)


@dataclass
class FakePredictor:
    """Answers by an image's red value. Every call waits for `gate` and is told in `launched`."""

    max_batch: int = 4
    streams: int = 1
    batch_sizes: tuple[int, ...] | None = None
    compiled: str = "off"
    device: str = "cpu"
    launched: list[list[int]] = field(default_factory=list)
    warm_ups: int = 0
    device_is_dead: bool = False
    error: type[BaseException] = RuntimeError

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def warm_up(self) -> None:
        self.warm_ups += 1

    def check(self) -> None:
        if self.device_is_dead:
            raise DeviceError(f"{self.device}: the model does not run")

    def launch_size(self, count: int) -> int:
        return count if self.batch_sizes is None else next(size for size in self.batch_sizes if size >= count)

    def predict(
        self, images: NDArray[np.uint8], *, top_k: int, maps: Sequence[MapRequest | None] = ()
    ) -> BatchPrediction:
        reds = [int(image[0, 0, 0]) for image in images]
        self.launched.append(reds)
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        if self.device_is_dead or BAD in reds:
            raise self.error("it does not compute")
        answers = [answer(red, top_k) for red in reds]
        found = [
            None
            if request is None
            else AttentionMap(request.layer, request.head, np.full((2, 2), 0.25, np.float32), red / 256)
            for red, request in zip(reds, maps or [None] * len(reds), strict=True)
        ]
        return BatchPrediction(
            np.stack([scores for scores, _ in answers]),
            np.stack([indices for _, indices in answers]),
            np.array([red != NAN for red in reds]),
            found,
        )

    async def wait_until_busy(self) -> None:
        """Until one more `predict` has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=PATIENCE)


@dataclass
class Rig:
    """A running engine and what it told; `close` closes it where it runs."""

    engine: Engine
    close: Callable[[], Coroutine[Any, Any, None]]
    predictor: FakePredictor
    reports: list[BatchReport] = field(default_factory=list)
    states: list[str] = field(default_factory=list)

    async def ask(self, red: int, *, top_k: int = 3, timeout: float = PATIENCE, **request: Any) -> InferenceResult:
        return await self.engine.infer(InferenceRequest(pixels(red), top_k, **request), timeout=timeout)

    def ask_soon(self, red: int, **options: Any) -> asyncio.Task[InferenceResult]:
        return asyncio.create_task(self.ask(red, **options))

    async def keep_busy(self, red: int = 0) -> asyncio.Task[InferenceResult]:
        """Close the gate and send one image in: from now on images wait until `predictor.gate.set()`."""
        self.predictor.gate.clear()
        task = self.ask_soon(red)
        await self.predictor.wait_until_busy()
        return task

    async def until_queued(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.engine.status.queue_depth != count:
                await asyncio.sleep(0.001)

    async def until_state(self, state: str) -> None:
        async with asyncio.timeout(PATIENCE):
            while (status := self.engine.status).state != state:
                assert status.state != "failed", status.reason
                await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    predictor: FakePredictor | None = None,
    *,
    load: Callable[[], tuple[FakePredictor, ModelInfo]] | None = None,
    queue_size: int = 100,
    max_delay: float = 0.0,
    ready: bool = True,
    remote: bool = False,
) -> AsyncIterator[Rig]:
    """An engine with a fake predictor; `remote`: asked as from another process, over a socket and shared memory."""
    predictor = predictor or FakePredictor()
    rig: Rig

    def on_batch(report: BatchReport) -> None:
        rig.reports.append(report)

    def told() -> None:
        rig.states.append(rig.engine.status.state)

    async with AsyncExitStack() as stack:
        counters = stack.enter_context(closing(SharedCounters(workers=1, engines=1, capacity=queue_size)))
        engine = LocalEngine(
            load or (lambda: (predictor, model_info(max_batch=predictor.max_batch))),
            device="auto",
            queue_size=queue_size,
            max_delay=max_delay,
            on_batch=on_batch,
            on_queue=lambda depth: counters.queue_depth.__setitem__(0, depth),
        )
        if remote:
            channel = EngineChannel(0, "auto", counters, slots=2 * queue_size)
            stack.callback(channel.close)
            server = EngineServer(engine, channel, workers=1)
            rig = Rig(RemoteEngine(channel, 0), server.close, predictor)
            await server.start()
            stack.push_async_callback(rig.engine.close)
        else:
            rig = Rig(engine, engine.close, predictor)
        rig.engine.start(told)
        try:
            if ready:
                await rig.until_state("ready")
            yield rig
        finally:
            predictor.gate.set()
            await rig.close()
            await rig.until_state("failed" if "failed" in rig.states else "closed")


class FakeEngine:
    """An engine without a thread: answers by red value, or with the error it was told to."""

    def __init__(self, info: ModelInfo | None = None) -> None:
        self.info: ModelInfo | None = info or model_info()
        self.state = "ready"
        self.reason = ""
        self.error: ServiceError | Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.cancelled = 0
        self.timeouts: list[float] = []

    @property
    def status(self) -> EngineStatus:
        return EngineStatus("cpu", self.state, self.reason, "off", None, self.waiting)  # type: ignore[arg-type]

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def start(self, on_change: Callable[[], None]) -> None:
        on_change()

    async def infer(self, request: InferenceRequest, *, timeout: float) -> InferenceResult:
        self.timeouts.append(timeout)
        self.waiting += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        if self.error is not None:
            raise self.error
        red = int(request.pixels[0, 0, 0])
        scores, indices = answer(red, request.top_k)
        found = None
        if request.map is not None:
            values = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32)
            found = AttentionMap(request.map.layer, request.map.head, values, 0.9)
        return InferenceResult(scores, indices, found, 1, 0.001, 0.002)

    async def close(self) -> None:
        self.state = "closed"


Message = dict[str, Any]


class Exchange:
    """One HTTP request to an ASGI application, message by message, as a server would bring them."""

    def __init__(
        self,
        app: Any,
        method: str,
        path: str,
        *,
        headers: dict[str, str] | None = None,
        body: bytes | None = b"",
        query: str = "",
    ) -> None:
        raw = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        if body is None:
            raw.append((b"transfer-encoding", b"chunked"))
        elif body and not any(name in (b"content-length", b"transfer-encoding") for name, _ in raw):
            raw.append((b"content-length", str(len(body)).encode()))
        self.scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": raw,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "state": {},
        }
        self.app = app
        self.inbox: asyncio.Queue[Message] = asyncio.Queue()
        self.sent: list[Message] = []
        self.received = 0
        if body is not None:
            self.feed(body, more=False)

    def feed(self, body: bytes, *, more: bool = True) -> None:
        self.inbox.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def disconnect(self) -> None:
        self.inbox.put_nowait({"type": "http.disconnect"})

    async def _receive(self) -> Message:
        self.received += 1
        return await self.inbox.get()

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def run(self) -> Exchange:
        async with asyncio.timeout(PATIENCE):
            await self.app(self.scope, self._receive, self._send)
        return self

    def start(self) -> asyncio.Task[Exchange]:
        return asyncio.create_task(self.run())

    @property
    def answered(self) -> bool:
        return bool(self.sent)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode().lower(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def content(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    @property
    def json(self) -> Any:
        return json.loads(self.content)

    @property
    def code(self) -> str:
        """The problem code; the answer must be a whole problem document."""
        assert self.headers["content-type"] == "application/problem+json"
        document = self.json
        assert set(document) == {"type", "title", "status", "detail", "code", "request_id"}
        assert document["status"] == self.status
        assert document["request_id"] == self.headers["x-request-id"]
        assert "\n" not in document["detail"]
        code: str = document["code"]
        return code
