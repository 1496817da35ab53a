"""The fair queue with the test's clock, and lanes with real threads."""

import asyncio
import gc
import heapq
import math
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from service.errors import DeadlineExceeded, QueueFull
from service.web.fair_queue import FairQueue, QueuedJob
from service.web.lanes import Deadline, Lane
from tests.service.fakes import PATIENCE, on_a_loop, until
from tests.service.web.apps import Clock, settle

# The queue


class Numbered(QueuedJob):
    def __init__(self, item: int, size: float, deadline: float) -> None:
        super().__init__(size, deadline)
        self.item = item


class Arrival(QueuedJob):
    def __init__(self, caller: str, seconds: float, moment: float, patience: float) -> None:
        super().__init__(1, moment + patience)
        self.caller = caller
        self.seconds = seconds
        self.moment = moment


class QueueMachine(RuleBasedStateMachine):
    """Jobs of a few callers in numbered order, with work of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.servers = 2
        self.number = 0
        self.waiting: dict[int, tuple[str, Numbered]] = {}
        self.under_way: list[tuple[str, Numbered]] = []
        self.begun: list[int] = []

    @initialize(per_caller=st.sampled_from([1, 2, math.inf]))
    def build(self, per_caller: float) -> None:
        self.per_caller = per_caller
        self.queue: FairQueue[Numbered] = FairQueue(lambda: self.servers, self.clock, per_caller)

    def may_begin(self, caller: str) -> bool:
        return [whose for whose, _ in self.under_way].count(caller) < self.per_caller

    @rule(caller=st.sampled_from("abc"), size=st.integers(1, 100), seconds=st.floats(0.01, 20))
    def add(self, caller: str, size: int, seconds: float) -> None:
        self.number += 1
        entry = Numbered(self.number, size, self.clock.now + seconds)
        try:
            self.queue.add(entry, caller)
        except QueueFull:
            callers = [whose for whose, _ in self.waiting.values()]
            waits = caller in callers or self.per_caller == math.inf or not self.may_begin(caller)
            assert callers and (waits or len(self.under_way) >= self.servers), (
                "whoever begins at once is not refused"
            )
        else:
            self.waiting[self.number] = caller, entry

    @rule()
    def begin(self) -> None:
        timely = [
            entry
            for caller, entry in self.waiting.values()
            if entry.deadline > self.clock.now and self.may_begin(caller)
        ]
        entry = self.queue.begin()
        for number, (_, other) in list(self.waiting.items()):
            if other.state != "waiting" and other is not entry:
                assert other.deadline <= self.clock.now, "only late jobs are dropped"
                del self.waiting[number]
        if entry is None:
            assert not timely or len(self.under_way) >= self.servers, (
                "a server idles while a job waits"
            )
            return
        caller, _ = self.waiting.pop(entry.item)
        assert entry.deadline > self.clock.now, "too late to be answered"
        assert self.may_begin(caller)
        assert all(
            entry.item < other for other, (whose, _) in self.waiting.items() if whose == caller
        )
        self.under_way.append((caller, entry))
        self.begun.append(entry.item)

    @rule(seconds=st.floats(0, 5), which=st.integers(0, 9))
    def end(self, seconds: float, which: int) -> None:
        if self.under_way:
            _, entry = self.under_way.pop(which % len(self.under_way))
            self.clock.now += seconds
            self.queue.charge(entry, seconds)
            self.queue.leave(entry)
            self.queue.leave(entry)  # leaving twice returns the slot once

    @rule(which=st.integers(0, 9))
    def drop(self, which: int) -> None:
        if self.waiting:
            number = list(self.waiting)[which % len(self.waiting)]
            self.queue.leave(self.waiting.pop(number)[1])

    @rule(servers=st.integers(1, 4))
    def change_servers(self, servers: int) -> None:
        self.servers = servers

    @invariant()
    def counts_hold(self) -> None:
        assert (self.queue.waiting, self.queue.under_way) == (
            len(self.waiting),
            len(self.under_way),
        )
        assert len(set(self.begun)) == len(self.begun)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@dataclass
class Simulation:
    """Jobs with arrival times and seconds of work, and their outcomes by caller."""

    servers: int = 1
    per_caller: float = math.inf
    clock: Clock = field(default_factory=Clock)
    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    waits: list[tuple[str, float]] = field(default_factory=list)

    def run(self, arrivals: list[tuple[float, str, float]], *, patience: float = 10.0) -> None:
        """Serve arrivals (moment, caller, seconds of work) that must begin within `patience`."""
        queue: FairQueue[Arrival] = FairQueue(lambda: self.servers, self.clock, self.per_caller)
        numbers = count()
        start = self.clock.now
        jobs = [
            Arrival(caller, seconds, start + moment, patience)
            for moment, caller, seconds in arrivals
        ]
        events = [(job.moment, next(numbers), job) for job in jobs]
        heapq.heapify(events)
        while events:
            self.clock.now, _, job = heapq.heappop(events)
            if job.state == "under way":
                queue.charge(job, job.seconds)
                queue.leave(job)
                self.answered[job.caller] += 1
            else:
                try:
                    queue.add(job, job.caller)
                except QueueFull:
                    self.refused[job.caller] += 1
            while (begun := queue.begin()) is not None:
                self.waits.append((begun.caller, self.clock.now - begun.moment))
                heapq.heappush(events, (self.clock.now + begun.seconds, next(numbers), begun))


def test_costly_work_delays_its_own_caller() -> None:
    simulation = Simulation(servers=2)
    hostile = [(0.25 * burst, "hostile", 0.15) for burst in range(80) for _ in range(64)]
    honest = [(0.05 * number, "honest", 0.01) for number in range(400)]
    simulation.run([*hostile, *honest])
    assert simulation.answered["honest"] == 400
    assert max(wait for caller, wait in simulation.waits if caller == "honest") < 0.4
    assert simulation.refused["hostile"] > 4000


@pytest.mark.parametrize(
    ("servers", "each"), [(1, math.inf), (4, 1)], ids=["one", "one of four for each caller"]
)
def test_late_jobs_are_refused_early(servers: int, each: float) -> None:
    simulation = Simulation(servers, each)
    simulation.run([(0.02 * number, "only", 0.1) for number in range(1000)], patience=2.0)
    assert simulation.refused["only"] > 700
    assert simulation.refused["only"] + simulation.answered["only"] > 980
    assert simulation.answered["only"] > 180
    assert max(wait for _, wait in simulation.waits) < 2.0


@given(st.lists(st.floats(0.01, 0.3), min_size=2, max_size=4))
@settings(max_examples=30, deadline=None)
def test_busy_callers_get_equal_shares(costs: list[float]) -> None:
    simulation = Simulation()
    simulation.run(
        [
            (0.0, f"{number}", cost)
            for number, cost in enumerate(costs)
            for _ in range(int(5 / cost))
        ],
        patience=1e9,
    )
    had = dict.fromkeys(map(str, range(len(costs))), 0.0)
    for caller, _ in simulation.waits:
        had[caller] += costs[int(caller)]
        if max(had.values()) > 4:
            break
    assert max(had.values()) - min(had.values()) <= 3 * max(costs)


def test_an_immediate_job_is_accepted() -> None:
    clock = Clock()
    queue: FairQueue[QueuedJob] = FairQueue(lambda: 8, clock, per_caller=2)
    first, one, *many = (
        QueuedJob(size, clock.now + 10 + size) for size in (250, 1, 250, 250, 250, 250)
    )
    queue.add(first, "many")
    queue.begin()
    clock.now += 10  # a job takes so long
    queue.leave(first)
    for entry in many:
        queue.add(entry, "many")
        queue.begin()
    queue.add(one, "one")
    assert queue.begin() is one


def test_a_quiet_caller_does_not_save_turns() -> None:
    simulation = Simulation()
    busy = [(0.0, "busy", 0.1) for _ in range(100)]
    simulation.run([*busy, *((5.0, "quiet", 0.1) for _ in range(50))], patience=1e9)
    after = [caller for caller, _ in simulation.waits][52:92]
    assert 18 <= Counter(after)["quiet"] <= 22


def test_many_callers_begin_by_their_use() -> None:
    clock = Clock()
    queue: FairQueue[Arrival] = FairQueue(lambda: 1, clock)
    seconds = [(7 * number % 300 + 1) / 1000 for number in range(300)]
    for number in [*range(300), *range(300)]:
        queue.add(Arrival(f"{number}", seconds[number], clock.now, 1e9), number)
    served: list[float] = []
    while (job := queue.begin()) is not None:
        served.append(job.seconds)
        clock.now += job.seconds
        queue.charge(job, job.seconds)
        queue.leave(job)
    assert served == seconds + sorted(seconds)


def test_callers_of_long_ago_are_forgotten() -> None:
    clock = Clock()
    queue: FairQueue[QueuedJob] = FairQueue(lambda: 1, clock)
    for number in range(20_000):
        queue.add(QueuedJob(1, clock.now + 1), number)
        entry = queue.begin()
        assert entry is not None
        queue.charge(entry, 0.001)
        queue.leave(entry)
    assert sys.getsizeof(queue._shares) < 1 << 20


# Lanes


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("a test", threads=1)
    yield made
    made.close()


class Blocker:
    """Work that runs until the test releases it."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return "done"

    async def wait_until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, PATIENCE)


def soon(seconds: float = PATIENCE) -> Deadline:
    return Deadline(time.monotonic() + seconds)


async def run(lane: Lane, work: Callable[[], object], deadline: Deadline | None = None) -> object:
    with lane.work(work, "caller", 1, deadline or soon()) as job:
        return await job


@on_a_loop
async def test_threads_return_the_outcome_of_work(lane: Lane) -> None:
    assert await asyncio.gather(
        *(run(lane, partial(int, str(number))) for number in range(20))
    ) == list(range(20))
    with pytest.raises(ZeroDivisionError):
        await run(lane, lambda: 1 / 0)
    assert await run(lane, lambda: None) is None


@on_a_loop
async def test_a_waiting_job_ends_with_its_caller(lane: Lane) -> None:
    class Picture:
        pass

    blocker = Blocker()
    picture = Picture()
    ran = list[object]()
    running = asyncio.create_task(run(lane, blocker))
    await blocker.wait_until_begun()
    held = weakref.ref(picture)
    following = asyncio.create_task(run(lane, lambda: 1))  # the thread takes it without the loop
    waiting = asyncio.create_task(run(lane, partial(ran.append, picture)))
    del picture
    await settle()
    assert lane.waiting == 1
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert lane.waiting == 0
    del waiting
    await settle()
    assert held() is None
    blocker.go_on.set()
    assert (await running, await following) == ("done", 1)
    assert ran == []


@on_a_loop
async def test_a_waiting_job_ends_at_its_deadline(lane: Lane) -> None:
    blocker = Blocker()
    ran = list[int]()
    running = asyncio.create_task(run(lane, blocker))
    await blocker.wait_until_begun()
    with pytest.raises(DeadlineExceeded, match="before a test was free"):
        await run(lane, partial(ran.append, 1), soon(0.05))
    assert not running.done()
    blocker.go_on.set()
    await running
    assert ran == []


@on_a_loop
async def test_a_thread_finishes_abandoned_work(lane: Lane) -> None:
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    def fail() -> None:
        blocker()
        raise ValueError("nobody asks for it any more")

    blocker = Blocker()
    left = asyncio.create_task(run(lane, fail))
    await blocker.wait_until_begun()
    left.cancel()
    await asyncio.wait((left,))
    following = asyncio.create_task(run(lane, lambda: 3))
    await settle()
    assert not following.done()
    blocker.go_on.set()
    assert await following == 3
    gc.collect()
    assert complaints == []


@on_a_loop
async def test_work_keeps_its_thread_until_it_ends() -> None:
    lane = Lane("a test", lambda: 1, threads=2)
    began = list[int]()
    with lane.work(lambda: began.append(1), "caller", 1, soon()) as first:
        await first
        second = lane.work(lambda: began.append(2), "caller", 1, soon())
        await settle()
        assert began == [1]
    with second:
        await second
    assert began == [1, 2]
    lane.close()


def test_a_lane_outlives_a_closed_event_loop(
    lane: Lane,
) -> None:
    blocker = Blocker()

    async def leave() -> None:
        lane.work(blocker, "a", 1, soon())
        await blocker.wait_until_begun()

    asyncio.run(leave())
    blocker.go_on.set()
    for number in range(20):
        assert asyncio.run(run(lane, partial(int, number))) == number


@on_a_loop
async def test_a_turn_is_dropped_with_its_caller() -> None:
    lane = Lane("a test", lambda: 1)
    order = list[str]()

    async def work(name: str, caller: str) -> None:
        with lane.turn(caller, 1, soon()) as turn:
            await turn
            order.append(name)
            await asyncio.sleep(0.01)

    names = [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b")]
    tasks = [asyncio.create_task(work(*each)) for each in names]
    await settle()
    tasks[1].cancel()
    await asyncio.wait(tasks)
    assert order == ["a1", "b1", "a3"]
    with lane.turn("c", 1, soon()) as turn:
        await turn
        with pytest.raises(DeadlineExceeded), lane.turn("c", 1, soon(0.01)) as late:
            await late
        tasks.append(asyncio.create_task(work("a4", "a")))
        await settle()
        tasks[-1].cancel()  # the cancelled job is still queued when its turn comes
    await until(lambda: lane.waiting == 0)


@on_a_loop
async def test_a_turn_near_threads_costs_its_size() -> None:
    clock = Clock()
    order = list[str]()
    lane = Lane("a test", lambda: 1, threads=1, clock=clock)

    def work(caller: str) -> None:
        order.append(caller)
        clock.now += 0.25

    async def decode(caller: str) -> None:
        with lane.work(partial(work, caller), caller, 1, Deadline(1e9, clock)) as job:
            await job

    await decode("threads")
    with lane.turn("process", 1, Deadline(1e9, clock)) as turn:
        await turn
        decoding = [
            asyncio.create_task(decode(caller))
            for caller in ("threads", "threads", "process", "process")
        ]
        await settle()
        clock.now += 100  # the model is slow
    await asyncio.gather(*decoding)
    assert order == ["threads", "threads", "process", "threads", "process"]
    lane.close()
