"""When a stream takes its next batch, how long it sleeps until then, and who is woken; without a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from model.outputs import MapRequest, RequestedOutputs
from service.engine.messages import InferenceRequest
from service.engine.streams import Streams
from tests.service.fakes import FakePredictor, pixels, request_for

GAE = MapRequest("gae", 3)


class Scripted:
    """A condition of which somebody who waits does what happens next in `turns`, or lets the time pass."""

    def __init__(self, turns: Turns, name: str) -> None:
        self._turns = turns
        self._name = name

    def __enter__(self) -> None:
        """Take the lock, which nobody else wants."""

    def __exit__(self, *_: object) -> None:
        """Leave it."""

    def wait(self, timeout: float | None = None) -> None:
        turns = self._turns
        turns.waits.append(timeout)
        if turns.to_happen:
            turns.to_happen.pop(0)()
        else:
            assert timeout is not None, "it sleeps, and nobody will wake it"
            turns.now += timeout

    def notify(self) -> None:
        self._turns.woken.append(self._name)

    def notify_all(self) -> None:
        self._turns.woken.append(f"all {self._name}")


class Turns:
    """Streams whose conditions are scripted.

    Attributes:
        waits: how long each wait was to last at most; None is without end.
        woken: which threads each notification woke, one or all.
        depths: what the owner heard of the number of images that wait.
    """

    def __init__(self, *, max_delay: float = 0.0) -> None:
        self.now = 100.0
        self.waits: list[float | None] = []
        self.woken: list[str] = []
        self.depths: list[int] = []
        self.to_happen: list[Callable[[], object]] = []
        self.streams = Streams(
            queue_size=20,
            max_delay=max_delay,
            deliver=lambda *_: None,
            on_queue=self.depths.append,
            clock=lambda: self.now,
        )
        self.streams._wake = Scripted(self, "streams")  # type: ignore[assignment]
        self.streams._wake_explanations = Scripted(self, "explanations")  # type: ignore[assignment]

    def put(self, red: int, wanted: MapRequest | None = None, timeout: float = 3600) -> None:
        self.streams.put(request_for(red, map=wanted), timeout)

    def classified(self, max_batch: int = 4) -> list[int] | None:
        """Return the red values of the next batch of classification, or None at the end."""
        return self._reds(max_batch, explained=False)

    def explained(self, max_batch: int = 100) -> list[int] | None:
        """Return those of the next batch of explanations."""
        return self._reds(max_batch, explained=True)

    def _reds(self, max_batch: int, *, explained: bool) -> list[int] | None:
        streams = self.streams
        poll = streams._next(streams._explanations if explained else streams._queue, max_batch)
        return None if poll is None else [int(np.asarray(entry.item.pixels)[0, 0, 0]) for entry in poll.batch]


def test_an_explanation_that_is_alone_is_launched_at_once_whatever_the_delay() -> None:
    turns = Turns(max_delay=5)
    turns.put(1, GAE)
    assert turns.explained() == [1]
    assert (turns.waits, turns.now) == ([], 100.0)


def test_an_explanation_lets_classification_go_first_until_it_has_waited_for_long() -> None:
    turns = Turns()
    turns.put(1)
    turns.now += 10  # how long the others wait is of no account
    turns.put(2, GAE)
    turns.now += 0.25
    assert turns.explained() == [2]
    assert turns.waits == [0.75]
    assert turns.now == 111  # a second after it came


def test_explanations_go_when_the_last_of_the_others_has_been_taken() -> None:
    turns = Turns()
    for red in range(3):
        turns.put(red)
    turns.put(9, GAE)
    turns.woken.clear()
    turns.to_happen = [lambda: turns.classified(2), lambda: turns.classified(2)]
    assert turns.explained() == [9]
    assert len(turns.waits) == 2
    assert turns.now == 100
    assert turns.woken == ["explanations"]  # by the batch after which nothing else waited, and by no other


def test_explanations_are_told_when_the_last_of_the_others_leaves_the_queue() -> None:
    turns = Turns()
    entries = [turns.streams.put(InferenceRequest(pixels(red), RequestedOutputs(3)), 3600) for red in range(2)]
    turns.put(9, GAE)
    turns.woken.clear()
    turns.streams.cancel(entries[0])
    assert turns.woken == []
    turns.streams.cancel(entries[1])
    assert turns.woken == ["explanations"]
    assert turns.depths[-2:] == [2, 1]


def test_explanations_are_told_when_the_others_are_out_of_time() -> None:
    turns = Turns()
    turns.put(1, timeout=1)  # its timer is late: the event loop is busy
    turns.put(9, GAE)
    turns.now += 2
    turns.woken.clear()
    turns.to_happen = [lambda: turns.woken.append("asleep"), turns.streams.stop]
    assert turns.classified() is None
    # Once, or streams would wake each other without end.
    assert turns.woken == ["explanations", "asleep", "all streams", "all explanations"]


def test_nobody_is_told_where_no_explanation_waits() -> None:
    turns = Turns()
    turns.streams.cancel(turns.streams.put(InferenceRequest(pixels(1), RequestedOutputs(3)), 3600))
    turns.put(2)
    assert turns.classified() == [2]
    assert turns.woken == ["streams", "streams"]  # by the two that were put


def test_a_stream_of_classification_sleeps_while_explanations_alone_wait() -> None:
    turns = Turns()
    turns.put(9, GAE)
    turns.to_happen = [lambda: turns.put(1)]
    assert turns.classified() == [1]
    assert turns.waits == [None]


def test_the_thread_of_explanations_sleeps_without_end_while_there_is_none() -> None:
    turns = Turns()
    turns.put(1)
    turns.to_happen = [turns.classified, lambda: turns.put(9, GAE)]
    assert turns.explained() == [9]
    assert turns.waits == [None, None]


def test_a_batch_that_is_held_back_is_looked_at_when_its_delay_ends() -> None:
    turns = Turns(max_delay=2)
    turns.put(1)
    turns.now += 0.5
    assert turns.classified() == [1]
    assert turns.waits == [1.5]


def test_an_image_wakes_one_thread_of_its_kind_and_no_other() -> None:
    turns = Turns()
    turns.put(1)
    turns.put(2, GAE)
    assert turns.woken == ["streams", "explanations"]


@pytest.mark.parametrize("explained", [False, True])
def test_whoever_sleeps_ends_when_it_is_told_to_stop(explained: bool) -> None:
    turns = Turns()
    turns.to_happen = [turns.streams.stop]
    assert (turns.explained() if explained else turns.classified()) is None
    assert turns.woken == ["all streams", "all explanations"]
    turns.put(1, GAE if explained else None)
    assert (turns.explained() if explained else turns.classified()) is None  # what waits is left in the queue


def test_those_that_wait_are_counted_whichever_queue_they_are_in() -> None:
    turns = Turns()
    turns.put(1)
    turns.put(2, GAE)
    turns.put(3, MapRequest.row(2))
    assert turns.depths == [1, 2, 3]
    assert len(turns.streams) == 3
    assert turns.classified() == [1, 3]
    assert turns.depths[-1] == 1
    turns.put(4)
    assert {int(np.asarray(entry.item.pixels)[0, 0, 0]) for entry in turns.streams.close()} == {2, 4}
    assert turns.depths[-1] == 0


@pytest.mark.parametrize(("max_batch", "at_once"), [(100, 8), (3, 3)])
def test_an_explanation_batch_is_small(max_batch: int, at_once: int) -> None:
    turns = Turns()
    for red in range(10):
        turns.put(red, GAE)
    predictor = FakePredictor(max_batch=max_batch)
    turns.to_happen = [turns.streams.stop]
    thread = threading.Thread(target=turns.streams._explain, args=(predictor,))  # which lowers its priority
    thread.start()
    thread.join()
    assert [len(batch) for batch in predictor.launched] == [at_once] * (10 // at_once) + [10 % at_once]
