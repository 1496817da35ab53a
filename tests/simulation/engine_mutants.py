"""Faults of admission and of an engine that the simulator must find: each takes one protection out
of the service's code, as a slip would.

A fault is a function that patches what it is given; its docstring says what is wrong then.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from service.cluster import shared_memory
from service.engine import local, streams
from service.engine.batching import BatchQueue, Poll, State
from service.errors import EngineUnavailable, InferenceFailed
from service.web import admission
from tests.simulation.device import Device

Mutant = Callable[[pytest.MonkeyPatch], None]


def permit_kept_on_error(patch: pytest.MonkeyPatch) -> None:
    """A request that fails or whose caller leaves keeps its permits."""
    release = admission.Permit.__exit__
    patch.setattr(
        admission.Permit,
        "__exit__",
        lambda self, kind, *rest: release(self, kind, *rest) if kind is None else None,
    )


def permit_released_but_one(patch: pytest.MonkeyPatch) -> None:
    """A request of several images gives one place back."""
    patch.setattr(admission.Permit, "__exit__", lambda self, *_: self._limiter.release(min(1, self._held)))


def permits_counted_by_one_worker(patch: pytest.MonkeyPatch) -> None:
    """Each worker's limiter looks only at the permits that it has given itself."""

    patch.setattr(admission.Limiter, "taken", property(lambda self: self.in_use))


def dead_workers_permits_kept(patch: pytest.MonkeyPatch) -> None:
    """The cells of a worker that was killed are not cleared."""
    patch.setattr(shared_memory.SharedCounters, "forget_worker", lambda self, worker: None)


def results_shifted(patch: pytest.MonkeyPatch) -> None:
    """Each image of a batch gets its neighbour's result."""
    predict = streams._predict
    patch.setattr(streams, "_predict", lambda *arguments: [*predict(*arguments)[1:], predict(*arguments)[0]])


def retries_swapped(patch: pytest.MonkeyPatch) -> None:
    """When a batch fails, its images are tried in the wrong order."""
    alone = streams._predict_alone
    memory: list[Any] = []

    def predict_alone(runner: Any, entry: Any, launched: float, clock: Any) -> Any:
        memory.append(entry)
        return alone(runner, memory[-2] if len(memory) > 1 else entry, launched, clock)

    patch.setattr(streams, "_predict_alone", predict_alone)


def failed_image_fails_its_batch(patch: pytest.MonkeyPatch) -> None:
    """The images of a batch that failed are not tried alone."""
    patch.setattr(streams, "_predict_alone", lambda *_: InferenceFailed("the batch failed"))


def numbers_without_meaning_sent(patch: pytest.MonkeyPatch) -> None:
    """Scores that are not finite are sent as an answer."""
    predict = Device.predict

    def careless(*arguments: Any, **options: Any) -> Any:
        return [dataclasses.replace(outputs, finite=True) for outputs in predict(*arguments, **options)]

    patch.setattr(Device, "predict", careless)


def launched_after_its_deadline(patch: pytest.MonkeyPatch) -> None:
    """The queue trusts the event loop's timer to take out what is too late."""
    patch.setattr(BatchQueue, "_oldest_in_time", lambda self, now: next(iter(self._entries), None))


def no_timer_for_the_deadline(patch: pytest.MonkeyPatch) -> None:
    """An image that expires in the queue is answered by nobody."""
    patch.setattr(local.LocalEngine, "_expire", lambda self, entry: None)


def launched_though_cancelled(patch: pytest.MonkeyPatch) -> None:
    """A cancelled image stays in the queue."""
    patch.setattr(streams.Streams, "cancel", lambda self, entry: None)


def queue_without_bound(patch: pytest.MonkeyPatch) -> None:
    """The queue takes one image more than it has places."""
    put = BatchQueue.put

    def one_more(self: Any, item: Any, *, deadline: float) -> Any:
        self._capacity += 1
        try:
            return put(self, item, deadline=deadline)
        finally:
            self._capacity -= 1

    patch.setattr(BatchQueue, "put", one_more)


def batch_too_large(patch: pytest.MonkeyPatch) -> None:
    """A batch may have one image too many."""
    poll = BatchQueue.poll
    patch.setattr(BatchQueue, "poll", lambda self, max_batch: poll(self, max_batch + 1))


def delay_from_the_poll(patch: pytest.MonkeyPatch) -> None:
    """The delay of a batch begins anew with each poll, and not with its oldest image."""

    def poll(self: Any, max_batch: int) -> Poll[Any]:
        oldest = self._oldest_in_time(self._clock())
        if oldest is not None and self._max_delay and len(self._entries) < max_batch and not hasattr(self, "seen"):
            self.seen = True
            return Poll(wait=self._max_delay)
        self.__dict__.pop("seen", None)
        return original(self, max_batch)

    original = BatchQueue.poll
    patch.setattr(BatchQueue, "poll", poll)


def nobody_woken(patch: pytest.MonkeyPatch) -> None:
    """A put does not wake a stream that sleeps."""

    def put(self: Any, request: Any, timeout: float) -> Any:
        with self._wake:
            return self._queue.put(request, deadline=self._clock() + timeout)

    patch.setattr(streams.Streams, "put", put)


def other_streams_go_on(patch: pytest.MonkeyPatch) -> None:
    """A stream that fails does not end the others."""

    def stop(self: Any) -> None:
        if not self._failures:
            original(self)

    original = streams.Streams.stop
    patch.setattr(streams.Streams, "stop", stop)


def idle_streams_not_told(patch: pytest.MonkeyPatch) -> None:
    """Streams that sleep are not woken when the engine ends."""
    patch.setattr(streams.Streams, "stop", lambda self: setattr(self, "_stopping", True))


def batch_of_a_failed_stream_unanswered(patch: pytest.MonkeyPatch) -> None:
    """What was on board when a stream failed gets no outcome."""
    deliver = local.LocalEngine._deliver

    def only_with_report(self: Any, outcomes: Any, report: Any = None) -> None:
        outcomes = [
            (entry, outcome)
            for entry, outcome in outcomes
            if not (isinstance(outcome, EngineUnavailable) and entry.state is State.LAUNCHED)
        ]
        deliver(self, outcomes, report)

    patch.setattr(local.LocalEngine, "_deliver", only_with_report)


def closed_queue_unanswered(patch: pytest.MonkeyPatch) -> None:
    """What waits when an engine ends gets no outcome."""
    close = streams.Streams.close
    patch.setattr(streams.Streams, "close", lambda self: close(self)[:0])


def explanations_held_back_by_nothing(patch: pytest.MonkeyPatch) -> None:
    """Explanations are launched while classification waits."""
    patch.setattr(BatchQueue, "age", lambda self: math.inf)


def explanations_starve(patch: pytest.MonkeyPatch) -> None:
    """Explanations wait for classification, however long that goes on."""
    patch.setattr(BatchQueue, "age", lambda self: 0.0)


def explanations_in_large_batches(patch: pytest.MonkeyPatch) -> None:
    """Explanations are launched in batches as large as those of classification."""

    def explain(self: Any, runner: Any) -> None:
        self._launch_all(runner, lambda: self._next(self._explanations, runner.max_batch))

    patch.setattr(streams.Streams, "_explain", explain)


def explanations_in_one_queue_with_classification(patch: pytest.MonkeyPatch) -> None:
    """A map that needs a pass of its own holds up a stream."""
    patch.setattr(streams.Streams, "_queue_of", lambda self, request: self._queue)


def explanations_not_woken(patch: pytest.MonkeyPatch) -> None:
    """When classification waits no more, explanations are not told."""
    patch.setattr(streams.Streams, "_wake_if_explanations_alone_wait", lambda self: None)


def explanations_on_every_stream(patch: pytest.MonkeyPatch) -> None:
    """Streams of classification take explanations when they have nothing else to do."""
    following = streams.Streams._next

    def either(self: Any, queue: Any, max_batch: int) -> Any:
        return following(self, self._explanations if len(self._explanations) else queue, max_batch)

    patch.setattr(streams.Streams, "_next", either)


MUTANTS: list[Mutant] = [
    mutant for mutant in list(globals().values()) if getattr(mutant, "__module__", "") == __name__ and callable(mutant)
]
