"""Random lives of models that share little memory: every drawn way is walked, no request is lost.

Engines are fakes without threads: the machine decides when a load ends, and when a device fails.
"""

import asyncio
import itertools
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from service.engine.messages import EngineState, EngineStatus, ModelInfo
from service.errors import ServiceError
from service.models.folder import FolderEntry
from service.models.local_models import LocalModels
from service.models.residency import RESIDENCY_SECONDS
from service.models.version import TRANSITIONS, State, Version
from service.settings import load_settings
from tests.service.fakes import model_info

NAMES = st.sampled_from("abc")
ENDS = st.sampled_from(["ready", "ready", "ready", "failed"])
WHICH = st.integers(0, 99)
MOST_REQUESTS = 6
TURNS = 60
"""Turns of the event loop after which all tasks wait for an event."""


class FakeEngine:
    """An engine whose load ends, and whose device fails, when the machine says so."""

    size = 100
    last_used = None

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint
        self.info: ModelInfo | None = None
        self.state: EngineState = "loading"
        self.is_started = False

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    @property
    def status(self) -> EngineStatus:
        reason = "" if self.ready else self.state
        return EngineStatus("cpu", self.state, reason, "", None, 0)

    def start(self, on_change: Any) -> None:
        self.is_started = True
        self.on_change = on_change

    def change(self, state: EngineState) -> None:
        self.state = state
        if state == "ready":
            text = self.checkpoint
            self.info = model_info(name=text, content=text, head=text, backbone=text)
        self.on_change()

    async def close(self) -> None:
        was_loading = self.is_started and self.state == "loading"
        self.state = "closed"
        if was_loading:
            self.on_change()  # wakes the callers that wait for the load


class Lives(RuleBasedStateMachine):
    """Three names, of which two fit, their requests, and the operator's changes."""

    walked: ClassVar[set[tuple[State, State]]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.checkpoints = itertools.count(1)
        self.engines: list[FakeEngine] = []
        self.held: list[tuple[str, FakeEngine]] = []
        self.answers: list[asyncio.Event] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.requests: list[asyncio.Task[None]] = []
        self.left: set[asyncio.Task[None]] = set()
        self.changed: set[str] = set()
        self.errors: list[object] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

    def make(self, settings: Mapping[str, Any]) -> Any:
        self.engines.append(FakeEngine(settings["checkpoint"]))
        return self.engines[-1]

    @initialize(ends=st.lists(ENDS, max_size=5), names=st.lists(NAMES, max_size=4))
    def start(self, ends: list[EngineState], names: list[str]) -> None:
        async def begin() -> None:
            configured = {name: FolderEntry({"checkpoint": name}, {}) for name in "abc"}
            limits = load_settings({"models_bytes": "200"})
            self.models = LocalModels(limits, self.make, configured, clock=lambda: self.now)
            self.models.start(lambda: None)

        self.loop.run_until_complete(begin())
        self.spin()
        for end in ends:
            self.load_ends(0, end)
        for name in names:
            self.request(name)

    def spin(self) -> None:
        async def turns() -> None:
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def begin(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run work that may be refused, but ends."""

        async def run() -> None:
            with suppress(ServiceError):
                await work

        task = self.loop.create_task(run())
        self.tasks.append(task)
        self.spin()
        return task

    # Callers

    @rule(name=NAMES)
    def request(self, name: str) -> None:
        if len(self.answers) < MOST_REQUESTS:
            self.requests.append(self.begin(self.answer(name)))

    @rule(which=WHICH)
    def leaves(self, which: int) -> None:
        """Disconnect a caller."""
        waiting = [task for task in self.requests if not task.done()]
        if waiting:
            task = waiting[which % len(waiting)]
            self.left.add(task)
            task.cancel()
            self.spin()

    async def answer(self, name: str) -> None:
        """Hold a model as a request does; the machine says when its answer is computed."""
        if self.models.needs_load(name):
            await self.models.load(name, "caller")
        with self.models.acquire(name) as lease:
            await lease.load(self.models, "caller")
            engine: Any = lease.engine
            assert lease.info.content == engine.checkpoint
            answered = asyncio.Event()
            self.answers.append(answered)
            request = (name, engine)
            self.held.append(request)
            try:
                await answered.wait()
            finally:
                self.held.remove(request)
                if answered in self.answers:
                    self.answers.remove(answered)

    @rule(which=WHICH)
    def answered(self, which: int) -> None:
        if self.answers:
            self.answers.pop(which % len(self.answers)).set()
            self.spin()

    @rule(seconds=st.sampled_from([1, RESIDENCY_SECONDS]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    # Devices

    @rule(which=WHICH, state=ENDS)
    def load_ends(self, which: int, state: EngineState) -> None:
        loading = [each for each in self.engines if each.is_started and each.state == "loading"]
        if loading:
            self.change(loading[which % len(loading)], state)

    @rule(which=WHICH)
    def device_fails(self, which: int) -> None:
        held = {engine for _, engine in self.held}
        ready = [each for each in self.engines if each.ready and each not in held]
        if ready:
            self.change(ready[which % len(ready)], "failed")

    def change(self, engine: FakeEngine, state: EngineState) -> None:
        version = self.version_of(engine)
        before = version.state
        engine.change(state)
        if version.state != before:
            self.walked.add((before, version.state))
        self.spin()

    def version_of(self, engine: FakeEngine) -> Version[Any]:
        return next(version for version in VERSIONS if version.engine is engine)

    # The operator

    @rule(name=NAMES)
    def put(self, name: str) -> None:
        self.changed.add(name)
        self.begin(self.models.put(name, {"checkpoint": f"{name}{next(self.checkpoints)}"}))

    @rule(name=NAMES)
    def unload(self, name: str) -> None:
        self.changed.add(name)
        self.begin(self.models.unload(name))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.changed.add(name)
        self.begin(self.models.delete(name))

    # Promises

    @invariant()
    def a_held_version_is_open(self) -> None:
        for name, engine in self.held:
            assert engine.ready
            if name not in self.changed:
                assert self.version_of(engine).state == "ready", "others took a busy model's memory"
        assert not self.errors

    @invariant()
    def no_version_stays_open(self) -> None:
        if not hasattr(self, "models"):
            return
        held = {engine for _, engine in self.held}
        for model in self.models.served.values():
            for version in model.versions.open - {model.current}:
                engine: Any = version.engine
                assert engine in held or engine.state == "loading" or version.requests

    def teardown(self) -> None:
        if hasattr(self, "models"):
            for _ in range(100):
                self.load_ends(0, "ready")
                self.answered(0)
                if all(task.done() for task in self.tasks):
                    break
            assert all(task.done() for task in self.tasks), "a request or a change never ends"
            self.loop.run_until_complete(self.models.close())
            for task in set(self.tasks) - self.left:
                task.result()
            assert all(each.state == "closed" for each in self.engines if each.is_started)
            assert not self.errors
        self.loop.close()


VERSIONS: list[Version[Any]] = []


@pytest.mark.timeout(180)
def test_every_transition_loses_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Version.move
    create = Version.__init__

    def noted_move(version: Version[Any], state: State) -> None:
        before = version.state
        move(version, state)
        if version.state != before:
            Lives.walked.add((before, version.state))

    def noted_create(version: Version[Any], *arguments: Any) -> None:
        create(version, *arguments)
        VERSIONS.append(version)

    monkeypatch.setattr(Version, "move", noted_move)
    monkeypatch.setattr(Version, "__init__", noted_create)
    for module in ("residency", "on_demand"):
        monkeypatch.setattr(f"service.models.{module}.RETIRE_SECONDS", 0.0)
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=100,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert set(TRANSITIONS) == Lives.walked
