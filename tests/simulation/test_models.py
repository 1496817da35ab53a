"""Random sequences of requests, deadlines, disconnects, failures and swaps on engine and models.

Engines have threads, but the tests do not depend on their speed. The queues' clock is injected,
each batch waits for its turn, and after each event the machine waits until all threads and tasks
wait. Hypothesis prints the shortest sequence that breaks a promise.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numpy.typing import NDArray

from model.errors import CheckpointError, DeviceError
from model.outputs import MapRequest, Outputs, RequestedOutputs
from service.engine import backbones
from service.engine.backbones import Backbones, FindRunner
from service.engine.engine import LocalEngine
from service.engine.messages import BatchReport, InferenceRequest, InferenceResult, ModelInfo
from service.errors import (
    CheckpointRefused,
    DeadlineExceeded,
    EngineUnavailable,
    InferenceFailed,
    QueueFull,
)
from service.models.local_models import LocalModels
from service.models.version import TRANSITIONS, State, Version
from service.settings import Settings, load_settings
from tests.service.fakes import (
    PATIENCE,
    holding,
    model_info,
)

CAPACITY = 6
MAX_BATCH = 3
SECONDS = 10
"""Seconds of the injected clock within which an image's batch must start."""

MOST = 20
"""Number of requests in flight."""

NAMES = st.sampled_from(["own", "shared", "shared", "broken"])
"""Whose backbone the next version has, or that it cannot be loaded."""

WHICH = st.integers(0, MOST - 1)

GAE = MapRequest("gae", 3)

pytestmark = pytest.mark.timeout(180)  # its threads take turns, slowly on a busy machine


class Runner:
    """A backbone whose answers name the head and the image.

    Each batch waits until the machine releases it.
    """

    streams = 2
    batch_sizes = None
    compiled = "off"
    device = "cpu"
    max_batch = MAX_BATCH

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.dead = False
        self.bad: set[int] = set()
        self.launched: list[tuple[list[int], float]] = []
        self.waiting = 0
        self.turns = threading.Semaphore(0)
        self.size = 0
        self.heads = dict[str, Any]()

    def warm_up(self, *, compile_later: bool = False) -> None:
        """Do nothing."""

    def finish_warm_up(self) -> None:
        """Do nothing."""

    def check(self) -> None:
        if self.dead:
            raise DeviceError("the device is lost")

    def defers(self, requested: RequestedOutputs) -> bool:
        return False

    def launch_size(self, count: int) -> int:
        return count

    def embed_texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        raise NotImplementedError

    def predict(
        self, images: Sequence[NDArray[np.uint8]], requests: Sequence[RequestedOutputs]
    ) -> list[Outputs]:
        try:
            checkpoints = [self.heads[requested.head_name] for requested in requests]
        except KeyError:  # the image's client has gone, and its version, too
            raise ValueError("the backbone has no such head") from None
        numbers = [int(image[0, 0, 0]) for image in images]
        if len(numbers) > 1 or not self.bad.issuperset(
            numbers
        ):  # otherwise the engine retries a bad image alone, in the same turn
            self.launched.append((numbers, self.clock()))
            self.waiting += 1
            assert self.turns.acquire(timeout=PATIENCE)
            self.waiting -= 1
        if self.dead or self.bad.intersection(numbers):
            raise RuntimeError("it does not compute")
        scores = np.ones(1, np.float32)
        return [
            Outputs(scores, np.array([1000 * checkpoint + number]))
            for checkpoint, number in zip(checkpoints, numbers, strict=True)
        ]


def reachable(state: State) -> set[State]:
    """Return the states that the table reaches from a state, with the state itself."""
    states = {state}
    while more := {after for before, after in TRANSITIONS if before in states} - states:
        states |= more
    return states


@dataclass(eq=False)
class Request:
    """A request from its headers to its end: it belongs to one version and one image."""

    number: int
    version: Version[Any]
    checkpoint: int
    head: str
    held: ExitStack = field(default_factory=ExitStack)
    answer: asyncio.Task[InferenceResult] | None = None
    gone: bool = False

    @property
    def is_answered(self) -> bool:
        return self.answer is not None and self.answer.done()


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose timers can be made to end at once."""

    passed_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.passed_seconds


class ModelMachine(RuleBasedStateMachine):
    """One served name, its requests, and the events."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.loop = Loop()
        self.numbers = itertools.count(1)
        self.checkpoints = itertools.count(1)
        self.runners: dict[int, Runner] = {}
        self.requests: list[Request] = []
        self.deadlines: dict[int, float] = {}
        self.dropped: set[int] = set()
        self.loading: asyncio.Task[None] | None = None
        self.load_gate = threading.Event()
        self.name = "shared"
        self.is_closed = False
        self.patch = pytest.MonkeyPatch()
        self.reports: list[BatchReport] = []
        self.states: dict[Version[Any], State] = {}
        self.errors: list[object] = []
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE))

    # The service

    def make(self, _: object) -> Any:
        number = next(self.checkpoints)
        self.patch.setattr(backbones, "LocalEngine", partial(LocalEngine, clock=lambda: self.now))
        return self.backbones.engine({"checkpoint": f"{self.name} {number}"})

    def load_model(self, settings: Settings, find: FindRunner) -> tuple[Runner, ModelInfo]:
        """Load a model on an engine's thread; its name says which others share its backbone."""
        assert self.load_gate.wait(PATIENCE)
        name = settings.checkpoint
        kind, _, number = name.partition(" ")
        if kind == "broken":
            raise CheckpointError("it cannot be read")
        backbone = kind if kind == "shared" else name
        runner = cast(Runner | None, find(backbone)) or Runner(lambda: self.now)
        runner.heads[name] = int(number)
        self.runners[int(number)] = runner
        return runner, model_info(name=name, head=name, backbone=backbone, max_batch=MAX_BATCH)

    @initialize(
        closes_early=st.booleans(),
        swaps=st.lists(NAMES, min_size=1, max_size=3),
        is_slow=st.booleans(),
    )
    def start(self, closes_early: bool, swaps: list[str], is_slow: bool) -> None:
        """Load a model, and swap it under requests that have sent their headers.

        Args:
            closes_early: whether the service ends before the answers.
            swaps: kinds of the next versions.
            is_slow: whether images wait behind the first batches: one is cancelled, some expire.
        """
        self.closes_early = closes_early
        self.load_gate.set()

        async def begin() -> None:
            limits = load_settings({"queue_size": CAPACITY})
            self.backbones = Backbones(limits, self.load_model, self.reports.append)
            self.models = LocalModels(limits, self.make)
            self.model = self.models.served[""]
            self.models.start(lambda: None)
            while not self.model.current.engine.ready:
                await asyncio.sleep(0)

        self.wait(begin())
        for name in swaps:
            self.head()
            self.load(name, ends=True)
        if is_slow:
            self.burst(2 * MAX_BATCH)  # both streams are busy with these
            self.burst(MAX_BATCH)
            self.leave(-1)
            self.compute(0, bad=False)
            self.burst(MAX_BATCH)
            self.time_passes(SECONDS)
            self.compute(0, bad=False)

    def checkpoint(self) -> int:
        info = self.model.current.engine.info
        assert info is not None
        return int(info.name.partition(" ")[2])

    def distinct_runners(self) -> list[Runner]:
        return list(dict.fromkeys(self.runners.values()))

    async def settle(self) -> None:
        """Wait until threads have taken all waiting images, and callers have their answers."""
        quiet = 0
        before = object()
        while quiet < 3:
            await asyncio.sleep(0.0005)
            self.look_at_states()
            engines = [(len(runner.launched), runner.waiting) for runner in self.distinct_runners()]
            waiting = [version.engine.status for version in self.model.versions.open]
            now = (
                engines,
                waiting,
                [each.answer.done() for each in self.requests if each.answer is not None],
            )
            # A thread that has taken a batch may not yet be in the model.
            open_versions: list[Version[Any]] = list(self.model.versions.open)
            engines_open = {version.engine.backbone for version in open_versions}
            taken = sum(len(engine._streams._under_way) for engine in engines_open)
            is_quiet = now == before and taken == sum(
                runner.waiting for runner in self.distinct_runners()
            )
            # A woken thread may not yet have looked into the queue.
            is_quiet &= not any(
                engine.ready
                and len(engine._streams._images.queue)
                and len(engine._streams._under_way) < Runner.streams
                for engine in engines_open
            )
            quiet = quiet + 1 if is_quiet else 0
            before = now

    def look_at_states(self) -> None:
        for version in {*self.states, *self.model.versions.open}:
            before = self.states.get(version, "loading")
            assert version.state in reachable(before), "no drawn way leads here"
            self.states[version] = version.state

    # Events of callers

    # Threads decide when a batch starts, so drawn values do not depend on state. A rule without
    # work returns.

    @rule()
    def head(self) -> None:
        """Receive the headers of a request."""
        if len(self.requests) >= MOST:
            return
        info = self.model.current.engine.info
        assert info is not None
        number = next(self.numbers) % 250
        request = Request(number, self.model.current, self.checkpoint(), info.head)
        request.held.enter_context(holding(request.version))
        self.requests.append(request)

    @rule(which=WHICH, explained=st.booleans())
    def body(self, which: int, explained: bool) -> None:
        """Receive a request's picture; sometimes it asks for a map of its own pass."""
        if awaited := [each for each in self.requests if each.answer is None]:
            self.ask(awaited[which % len(awaited)], GAE if explained else None)
            self.wait(self.settle())

    @rule(count=st.integers(2, 4 * MAX_BATCH))
    def burst(self, count: int) -> None:
        """Start requests of several callers at once."""
        for _ in range(min(count, MOST - len(self.requests))):
            self.head()
            self.ask(self.requests[-1], None)
        self.wait(self.settle())

    def ask(self, request: Request, wanted: MapRequest | None) -> None:
        image = InferenceRequest(
            np.full((1, 1, 3), request.number, np.uint8),
            RequestedOutputs(1, wanted, head_name=request.head),
        )

        async def answer() -> InferenceResult:
            with request.held:
                result: InferenceResult = await request.version.engine.infer(image, timeout=SECONDS)
                return result

        self.deadlines[request.number] = self.now + SECONDS
        request.answer = self.loop.create_task(answer())

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        asked = [each for each in self.requests if each.answer is not None]
        if not asked:
            return
        request = asked[which % len(asked)]
        assert request.answer is not None
        request.gone = not request.answer.done()
        request.answer.cancel()
        launched = [
            number
            for runner in self.distinct_runners()
            for batch, _ in runner.launched
            for number in batch
        ]
        if request.number not in launched:
            self.dropped.add(request.number)
        self.wait(self.settle())

    @rule(seconds=st.sampled_from([2, SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # Events of the device

    @rule(which=WHICH, bad=st.booleans())
    def compute(self, which: int, bad: bool) -> None:
        """Compute a batch, of which an image may be at fault."""
        busy = [each for each in self.distinct_runners() if each.waiting]
        if not busy:
            return
        runner = busy[which % len(busy)]
        if bad:
            batch = runner.launched[-1][0]
            runner.bad.add(batch[which % len(batch)])
        runner.turns.release()
        self.wait(self.settle())

    # Events of the operator

    @rule(name=NAMES, ends=st.booleans())
    def load(self, name: str, ends: bool) -> None:
        if self.is_loading:
            return
        self.load_gate.clear()
        self.name = name
        self.loading = self.loop.create_task(self.replace())
        self.loading.add_done_callback(lambda task: task.cancelled() or task.exception())
        self.wait(self.settle())
        if ends:
            self.loaded()

    @property
    def is_loading(self) -> bool:
        return self.loading is not None and not self.loading.done()

    async def replace(self) -> None:
        await self.models.put("", None)

    @rule()
    def loaded(self) -> None:
        """Finish or refuse the load."""
        self.load_gate.set()
        self.wait(self.settle())
        if self.loading is not None and self.loading.done():
            assert isinstance(self.loading.exception(), CheckpointRefused | None)

    # Promises

    @invariant()
    def every_answer_is_the_images_own_and_of_its_model(self) -> None:
        for request in list(self.requests):
            if request.answer is None or not request.answer.done():
                continue
            self.requests.remove(request)
            if request.answer.cancelled():
                assert request.gone
                continue
            error = request.answer.exception()
            if error is None:
                [index] = request.answer.result().outputs.indices.tolist()
                assert index == 1000 * request.checkpoint + request.number
            elif isinstance(error, InferenceFailed):
                bad = self.runners[request.checkpoint].bad
                assert request.number in bad or self.is_closed
            else:
                expected = QueueFull | DeadlineExceeded
                assert isinstance(error, EngineUnavailable if self.is_closed else expected), error

    @invariant()
    def versions_live_as_drawn(self) -> None:
        """Every transition was in the table, and callbacks raised no assertion."""
        if hasattr(self, "model"):
            self.look_at_states()
        assert not self.errors

    @invariant()
    def bounds_hold(self) -> None:
        for runner in self.distinct_runners():
            before: set[int] = set()  # images of a failed batch are launched again, one by one
            for numbers, at in runner.launched:
                assert len(numbers) <= MAX_BATCH
                first = set(numbers) - before
                before |= first
                assert all(at < self.deadlines[number] for number in first), (
                    "launched after its deadline"
                )
                assert self.dropped.isdisjoint(numbers), "launched for nobody"
            assert runner.waiting <= 3  # two streams, and the thread of maps
        assert len(self.model.versions.open) <= 2, "a third version is in memory"
        held = {request.version for request in self.requests if not request.is_answered}
        needless = {
            version
            for version in self.model.versions.open - held - {self.model.current}
            if version.state != "retiring"  # its thread is ending
        }
        if self.is_loading:
            assert len(needless) <= 1, "only one version loads at a time"
        else:
            assert not needless, "a version stays open that no request holds"
        for request in self.requests:
            if not request.is_answered:
                assert request.version in self.model.versions.open, (
                    "its engine is closed, and it has no answer"
                )

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            self.loop.close()
            return
        self.load_gate.set()
        for request in self.requests:
            if request.answer is None:
                request.held.close()
        if self.closes_early:
            self.close_models()
        else:
            self.loop.passed_seconds = SECONDS  # timers of images whose deadlines have passed
            deadline = time.monotonic() + PATIENCE
            while any(each.answer is not None and not each.answer.done() for each in self.requests):
                self.release_turns()
                self.wait(self.settle())
                assert time.monotonic() < deadline, "an answer never comes"
        self.every_answer_is_the_images_own_and_of_its_model()
        if not self.closes_early:
            self.close_models()
        assert not self.errors
        self.loop.close()
        self.patch.undo()

    def close_models(self) -> None:
        """Stop the service: queued images get an error at once."""
        self.is_closed = True
        self.release_turns()
        self.wait(self.models.close())
        self.wait(asyncio.sleep(0))
        assert all(each.is_answered for each in self.requests if each.answer is not None)
        self.look_at_states()
        assert set(self.states.values()) == {"closed"}

    def release_turns(self) -> None:
        for runner in self.distinct_runners():
            runner.turns.release(100)


TestModels = ModelMachine.TestCase
TestModels.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
