"""The audit: which pictures are computed again, when, how many are kept, and what is said of them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from model.outputs import EmbeddingRequest, MapRequest
from service.engine import streams as streams_module
from service.engine.audit import KEPT, WINDOW, Audit, AuditReport
from service.engine.messages import InferenceResult
from service.engine.streams import Streams, Waiting
from service.errors import InferenceFailed
from tests.service.fakes import BAD, FakePredictor, pixels, request_for


@pytest.fixture(autouse=True)
def priority_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit's thread is this one, whose priority every later test would have."""
    monkeypatch.setattr(streams_module, "lower_priority", lambda: None)


class Audited:
    """Streams that audit each picture, whose condition is scripted: whoever waits for it does what happens next."""

    def __init__(self, share: float = 1.0) -> None:
        self.runner = FakePredictor(audits=True)
        self.reports: list[AuditReport] = []
        self.to_happen: list[Callable[[], object]] = []
        self.streams = Streams(
            queue_size=100,
            max_delay=0,
            deliver=lambda *_: None,
            on_queue=lambda _: None,
            clock=lambda: 0.0,
            audit=Audit(share, draw=lambda: 0.0),
            on_audit=self.reports.append,
        )
        for name in ("_wake", "_wake_explanations", "_wake_audit"):
            setattr(self.streams, name, self)
        self.streams._audits = True  # as `run` finds it

    def __enter__(self) -> None:
        """Take the lock, which nobody else wants."""

    def __exit__(self, *_: object) -> None:
        """Leave it."""

    def wait(self, timeout: float | None = None) -> None:
        step = self.to_happen.pop(0) if self.to_happen else self.streams.stop
        step()

    def notify(self) -> None:
        """Wake nobody: there is one thread."""

    def notify_all(self) -> None:
        """Wake nobody: there is one thread."""

    def classify(self, *reds: int, **requested: Any) -> None:
        for red in reds:
            self.streams.put(request_for(red, **requested), 1)
        self.streams._launch_all(self.runner, self.streams._queue, 4)
        self.streams._stopping = False

    def audit(self) -> list[int]:
        """Run the audit's thread until it waits with nothing left to happen; return the pictures' red values."""
        self.streams._audit_all(self.runner)
        self.streams._stopping = False
        audited, self.runner.audited = self.runner.audited, []
        return audited


def result(red: int) -> InferenceResult:
    runner = FakePredictor()
    [outputs] = runner.predict([pixels(red)], [request_for(red).requested])
    return InferenceResult(outputs, 1, 0.0, 0.0)


def test_an_answered_picture_is_computed_again_and_its_best_class_compared() -> None:
    audited = Audited()
    audited.classify(2, 3)
    assert audited.audit() == [2, 3]
    assert audited.reports == [AuditReport("cpu", True, 1.0), AuditReport("cpu", False, 0.5)]


def test_a_picture_waits_for_its_audit_until_no_image_waits_or_is_computed() -> None:
    audited = Audited()
    streams = audited.streams
    audited.classify(2)
    seen: list[tuple[str, list[int]]] = []

    def look(what: str, then: Callable[[], object]) -> Callable[[], None]:
        def step() -> None:
            seen.append((what, list(audited.runner.audited)))
            then()

        return step

    entries: list[Waiting] = [streams.put(request_for(4), 1)]
    streams._launched_at[1] = 0.0
    audited.to_happen = [
        look("an image waits", lambda: streams.cancel(entries[0])),
        look("one is computed", streams._launched_at.clear),
        look("idle", streams.stop),
    ]
    audited.audit()
    assert seen == [("an image waits", []), ("one is computed", []), ("idle", [2])]


def test_a_stream_that_becomes_idle_wakes_the_audit() -> None:
    audited, woken = Audited(), list[int]()
    condition = SimpleNamespace(notify=lambda: woken.append(len(audited.streams._audit)), notify_all=lambda: None)
    audited.streams._wake_audit = condition  # type: ignore[assignment]
    audited.to_happen = [lambda: setattr(audited.streams, "_stopping", True)]
    audited.classify(2)
    assert woken == [1]


def test_few_pictures_are_kept_and_the_oldest_gives_way() -> None:
    audited = Audited()
    audited.classify(*range(2, 2 * KEPT + 6, 2))
    assert audited.audit() == list(range(6, 2 * KEPT + 6, 2))


def test_only_pictures_that_int8_answered_are_taken() -> None:
    """Whatever asks for a map or an embedding, its whole batch was computed in floating point."""
    audited = Audited()
    for requested in ({"map": MapRequest.row(layer=0, head="mean")}, {"embedding": EmbeddingRequest()}):
        audited.classify(2, **requested)
    assert audited.audit() == []
    assert not Audit(1.0, draw=lambda: 0.0).offer([pixels(2)], [InferenceFailed("no")])


def test_a_share_of_the_pictures_is_taken_and_zero_takes_none() -> None:
    numbers = iter([0.09, 0.1, 0.5, 0.05])
    audit = Audit(0.1, draw=lambda: next(numbers))
    assert audit.offer([pixels(red) for red in range(4)], [result(red) for red in range(4)])
    assert [int(audit.take().pixels[0, 0, 0]) for _ in range(len(audit))] == [0, 3]
    assert not Audit(0.0, draw=lambda: 0.0).offer([pixels(2)], [result(2)])


def test_a_kept_picture_is_a_copy_of_memory_that_the_next_one_gets() -> None:
    audit, image = Audit(1.0, draw=lambda: 0.0), np.array(pixels(2))
    audit.offer([image], [result(2)])
    image[:] = 77
    assert int(audit.take().pixels[0, 0, 0]) == 2


def test_the_share_is_of_the_last_pictures_alone() -> None:
    audit, runner = Audit(1.0, draw=lambda: 0.0), FakePredictor(audits=True)

    def told(red: int) -> AuditReport:
        audit.offer([pixels(red)], [result(red)])
        return audit.report(audit.take(), runner)

    assert told(3).agreement == 0
    for _ in range(WINDOW - 1):
        told(2)
    assert told(2).agreement == 1


def test_an_audit_that_fails_ends_and_the_engine_goes_on() -> None:
    audited = Audited()
    audited.streams._audit.offer([pixels(BAD)], [result(2)])
    assert audited.audit() == [BAD]
    audited.classify(2)
    assert audited.reports == []


def test_a_float_model_is_not_audited() -> None:
    audited = Audited()
    audited.streams._audits = False
    audited.classify(2)
    assert audited.audit() == []
