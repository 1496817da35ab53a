"""Fairness at admission: a lane's turns before a batch queue that treats clients alike.

Time is simulated. Busy callers always have pictures waiting; a light caller sends a few a second.
"""

import heapq
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from service.engine.batching import BatchQueue
from service.web.fair_queue import FairQueue, QueuedJob
from tests.service.web.apps import Clock

STREAMS = 2
BATCHES_AHEAD = 4
PATIENCE = 1e9
"""Seconds until a waiting picture expires, more than a test lasts."""


def on_cpu(size: int, busy: int) -> float:
    """Return the seconds of a batch; the streams share the cores, and a picture takes 10 ms."""
    return 0.002 + 0.009 * size * busy


def on_gpu(size: int, busy: int) -> float:
    """Return the seconds of a batch that takes as long for 32 pictures as for fewer."""
    return max(size, 32) * busy / 1500


class Picture(QueuedJob):
    """A picture of a caller that arrives now."""

    def __init__(self, caller: str, now: float) -> None:
        super().__init__(1, PATIENCE)
        self.caller = caller
        self.arrived = now


class Simulation:
    """Lane, queue and device of one service.

    Attributes:
        answered: pictures of each caller.
        latencies: seconds of each answer for the light caller.
    """

    def __init__(self, max_batch: int, batch_seconds: Callable[[int, int], float]) -> None:
        self.clock = Clock()
        capacity = BATCHES_AHEAD * max_batch
        self.lane: FairQueue[Picture] = FairQueue(lambda: capacity, self.clock, leaves_room=True)
        self.queue: BatchQueue[Picture] = BatchQueue(
            capacity=capacity, max_delay=0, clock=self.clock
        )
        self.max_batch = max_batch
        self.batch_seconds = batch_seconds
        self.busy_streams = 0
        self.answered: Counter[str] = Counter()
        self.latencies: list[float] = []
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._random = random.Random(3)

    def run(self, busy: Sequence[str], *, light_rate: float = 0.0, seconds: float = 16) -> None:
        """Run busy callers, with three times the lane's slots in pictures, and a light caller."""
        start = self.clock.now
        for number in range(3 * BATCHES_AHEAD * self.max_batch):
            self._send(start + self._random.random() / 100, busy[number % len(busy)])
        moment = start + 2
        while light_rate and moment < start + seconds:
            self._send(moment, "light")
            moment += self._random.expovariate(light_rate)
        while self._events[0][0] < start + seconds:
            self.clock.now, _, happen = heapq.heappop(self._events)
            happen()

    def _at(self, moment: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (moment, next(self._numbers), happen))

    def _send(self, moment: float, caller: str) -> None:
        self._at(moment, lambda: self._arrive(caller))

    def _arrive(self, caller: str) -> None:
        self.lane.add(Picture(caller, self.clock.now), caller)
        self._advance()

    def _advance(self) -> None:
        while (picture := self.lane.begin()) is not None:
            self.queue.put(picture, deadline=PATIENCE)
        while self.busy_streams < STREAMS:
            batch = [entry.item for entry in self.queue.poll(self.max_batch).batch]
            if not batch:
                return
            self.busy_streams += 1
            seconds = self.batch_seconds(len(batch), self.busy_streams)
            self._at(self.clock.now + seconds, lambda batch=batch: self._answer(batch))  # type: ignore[misc]

    def _answer(self, batch: list[Picture]) -> None:
        self.busy_streams -= 1
        for picture in batch:
            self.lane.charge(picture, 0.01)
            self.lane.leave(picture)
            self.answered[picture.caller] += 1
            if picture.caller == "light":
                self.latencies.append(self.clock.now - picture.arrived)
            else:
                self._send(self.clock.now + self._random.random() / 500, picture.caller)
        self._advance()


@pytest.mark.parametrize("busy", [1, 2, 4], ids=lambda count: f"{count} busy")
def test_a_light_caller_waits_two_batches(busy: int) -> None:
    simulation = Simulation(8, on_cpu)
    simulation.run([f"busy {number}" for number in range(busy)], light_rate=4)
    batch_seconds = on_cpu(8, STREAMS)
    assert len(simulation.latencies) > 40
    assert statistics.median(simulation.latencies) < 2 * batch_seconds
    assert max(simulation.latencies) < 3.5 * batch_seconds


@pytest.mark.parametrize(("max_batch", "device"), [(8, on_cpu), (64, on_gpu)], ids=["cpu", "gpu"])
def test_caller_count_changes_no_rate(max_batch: int, device: Callable[[int, int], float]) -> None:
    rates = {}
    for count in (1, 2, 4, 8):
        simulation = Simulation(max_batch, device)
        simulation.run([f"busy {number}" for number in range(count)])
        rates[count] = simulation.answered.total()
    assert min(rates.values()) >= 0.97 * max(rates.values())


def test_busy_callers_have_equal_parts() -> None:
    simulation = Simulation(8, on_cpu)
    simulation.run(["one", "two", "three"])
    parts = simulation.answered.values()
    assert max(parts) <= 1.1 * min(parts)
