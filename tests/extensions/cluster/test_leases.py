"""Random changes of the models of two engines, while two workers hold leases and ask.

Between two events, the event loop runs a few turns only, so that frames of several events are on
their way at once. Hypothesis prints the shortest sequence that loses a request.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from model.outputs import Outputs, RequestedOutputs
from service.engine.engine import LocalEngine
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable, ModelFailed, SwapUnderWay, UnknownModel
from service.extensions.cluster.engine_client import EngineClient
from service.extensions.cluster.engine_server import EngineServer
from service.extensions.cluster.remote_model import RemoteModels
from service.extensions.cluster.shared_pixels import SharedPixels, shared_memory
from service.models.all_models import Models
from service.models.folder import FolderEntry
from service.models.local_models import LocalModels
from service.models.version import Lease
from service.settings import load_settings
from service.web.image_stores import MemoryImageStore
from tests.service.fakes import PATIENCE, FakePredictor, model_info, request_for

WORKERS = st.integers(0, 1)
ENGINES = st.integers(0, 1)
TURNS = st.sampled_from([0, 1, 2, 3, 5, 10, 40])
GUEST = "b"
"""The model that comes and goes; `a` is the default."""


class Predictor(FakePredictor):
    """A predictor whose answers name its checkpoint, a number, and the picture."""

    checkpoint = 0

    def _answer(self, red: int, requested: RequestedOutputs) -> Outputs:
        outputs = super()._answer(red, requested)
        outputs.indices[0] = 1000 * self.checkpoint + red
        return outputs


def make(own: Mapping[str, Any]) -> Any:
    checkpoint = int(own["checkpoint"])

    def load() -> tuple[FakePredictor, ModelInfo]:
        predictor = Predictor()
        predictor.checkpoint = checkpoint
        return predictor, model_info(name=own["model_name"], content=str(checkpoint))

    engine = LocalEngine(load, device="cpu", queue_size=1000, max_delay=0, on_batch=lambda _: None)
    engine.last_used = None  # type: ignore[attr-defined]  # which engines of models have
    return engine


class Request(NamedTuple):
    """A request for the guest.

    Attributes:
        models: models of the worker that it came to.
        was_loaded: whether its version could answer when it was acquired.
        may_fail: whether another version or a deletion was under way then.
        replaced: number of replacements that had begun then.
    """

    models: Models
    lease: Lease
    was_loaded: bool
    may_fail: bool
    replaced: int


class LeaseMachine(RuleBasedStateMachine):
    """Two engines with a default model and a guest, two workers, their requests, and changes."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = TemporaryDirectory()
        self.numbers = itertools.count(1)
        self.checkpoints = itertools.count(10)
        self.held: list[Request] = []
        self.asked: list[asyncio.Task[None]] = []
        self.changes: list[asyncio.Task[Any]] = []
        self.replacing: list[asyncio.Task[Any]] = []
        self.errors: list[object] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 3))

    def spin(self, turns: int) -> None:
        async def sleep() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.wait(sleep())

    def change(self, work: Coroutine[Any, Any, Any]) -> None:
        self.changes.append(self.loop.create_task(work))

    def replace(self, work: Coroutine[Any, Any, Any]) -> None:
        self.change(work)
        self.replacing.append(self.changes[-1])

    @initialize()
    def start(self) -> None:
        paths = [Path(self.folder.name, str(index)) for index in range(2)]
        entries = {name: FolderEntry({"checkpoint": str(i)}, {}) for i, name in enumerate("ab", 1)}
        memories = [shared_memory(2) for _ in paths]

        async def begin() -> None:
            self.engines = list[EngineServer]()
            for path, memory in zip(paths, memories, strict=True):
                models = LocalModels(load_settings({"models": "x"}), make, entries)
                images = MemoryImageStore(ttl=60, max_bytes=1 << 20)
                server = EngineServer(models, images, memory)
                await server.start(path)
                self.engines.append(server)
            self.workers = [
                RemoteModels(
                    [
                        EngineClient(path, "cpu", SharedPixels(memory, index))
                        for path, memory in zip(paths, memories, strict=True)
                    ]
                )
                for index in range(2)
            ]
            for worker in self.workers:
                worker.start(lambda: None)
            while not all(self.is_ready(worker) for worker in self.workers):
                await asyncio.sleep(0.001)

        self.wait(begin())

    def is_ready(self, worker: RemoteModels) -> bool:
        return all(
            name in worker.served and len(worker.served[name].current.engine.engines) == 2
            for name in "ab"
        )

    # Requests

    @rule(which=WORKERS, turns=TURNS)
    def acquire(self, which: int, turns: int) -> None:
        """Receive the headers of a request for the guest."""
        models = self.workers[which]
        try:
            if not models.needs_load(GUEST):
                lease = models.acquire(GUEST)
                pending = [task for task in self.replacing if not task.done()]
                may_fail = bool(pending) and not lease.is_loaded
                self.held.append(
                    Request(models, lease, lease.is_loaded, may_fail, len(self.replacing))
                )
        except (UnknownModel, EngineUnavailable, ModelFailed):
            pass
        self.spin(turns)

    @rule(which=st.integers(0, 9), turns=TURNS)
    def ask(self, which: int, turns: int) -> None:
        """Receive the picture of a held request."""
        if self.held:
            request = self.held.pop(which % len(self.held))
            self.asked.append(self.loop.create_task(self.answer(request)))
        self.spin(turns)

    @rule(which=WORKERS, count=st.integers(2, 12))
    def burst(self, which: int, count: int) -> None:
        """Receive a request in each turn of the event loop."""
        for _ in range(count):
            self.acquire(which, 0)
            self.ask(-1, 1)

    @rule(turns=TURNS)
    def disconnect(self, turns: int) -> None:
        """End the oldest request without an answer."""
        if self.asked:
            self.asked[0].cancel()
        self.spin(turns)

    async def answer(self, request: Request) -> None:
        red = next(self.numbers) % 250
        with request.lease as lease:
            try:
                await lease.load(request.models, "caller")
            except (UnknownModel, EngineUnavailable):
                is_replaced = len(self.replacing) > request.replaced or request.may_fail
                assert not request.was_loaded, "a held version is closed"
                assert is_replaced, "an unloaded version is closed"
                return
            result = await lease.engine.infer(request_for(red), timeout=PATIENCE)
            assert result.outputs.indices[0] == 1000 * int(lease.info.content) + red

    # Changes

    @rule(which=WORKERS, turns=TURNS)
    def put(self, which: int, turns: int) -> None:
        what = {"checkpoint": str(next(self.checkpoints))}
        self.replace(self.workers[which].put(GUEST, what))
        self.spin(turns)

    @rule(which=WORKERS, turns=TURNS)
    def delete(self, which: int, turns: int) -> None:
        self.replace(self.workers[which].delete(GUEST))
        self.spin(turns)

    @rule(which=WORKERS, turns=TURNS)
    def unload(self, which: int, turns: int) -> None:
        self.change(self.workers[which].unload(GUEST))
        self.spin(turns)

    @rule(which=ENGINES, turns=TURNS)
    def evict(self, which: int, turns: int) -> None:
        """Give one engine's memory back, as for another model."""
        self.change(self.engines[which].models.unload(GUEST))
        self.spin(turns)

    @rule(turns=TURNS)
    def evict_everywhere(self, turns: int) -> None:
        for engine in self.engines:
            self.change(engine.models.unload(GUEST))
        self.spin(turns)

    # The end

    def teardown(self) -> None:
        if hasattr(self, "workers"):
            self.wait(self.end())
            self.spin(3)
        self.loop.close()
        self.folder.cleanup()
        assert not self.errors

    async def end(self) -> None:
        tasks = map(self.answer, self.held)
        results = await asyncio.gather(*tasks, *self.asked, return_exceptions=True)
        lost = [error for error in results if isinstance(error, Exception)]
        for error in await asyncio.gather(*self.changes, return_exceptions=True):
            assert isinstance(error, UnknownModel | SwapUnderWay | bool | None), error
        models = [engine.models for engine in self.engines]
        while any(
            len(model.versions.open) > 1 for each in models for model in each.served.values()
        ):
            await asyncio.sleep(0.001)  # until versions without requests are closed
        for worker in self.workers:
            await worker.close()
        for engine in self.engines:
            await engine.close()
        assert not lost, lost


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(
    max_examples=40,
    stateful_step_count=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
