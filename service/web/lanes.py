"""Lanes: a fair queue before everything that is scarce, such as threads and decoder processes.

    with lane.turn(caller, size, deadline) as turn:     the caller works itself
        await turn
        ...

    with lane.work(function, caller, size, deadline) as job:     a thread of the lane works
        result = await job

With one server, say a decoder process, caller A with three jobs of 100 ms and caller B with one:

    0.00 s    A enters a1, a2 and a3; a1 begins
    0.02 s    B enters b1
    0.10 s    a1 leaves; b1 begins, because B has had least
    0.15 s    A disconnects: a2 and a3 leave the queue
    0.20 s    b1 leaves; the server is free

A job is refused at once if it cannot begin before its deadline, and dropped if its time is up while
it waits. `service.web.fair_queue` decides the order.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from service.background import supervised_thread
from service.engine.devices import decode_threads
from service.engine.streams import MAX_EXPLANATION_BATCH
from service.errors import DeadlineExceeded
from service.models.all_models import Models
from service.settings import Settings
from service.web.fair_queue import FairQueue, QueuedJob

T = TypeVar("T")

# Batches of each engine that are decoded or being decoded: two under way, and two that wait.
# Decoding further ahead would slow down the batches under way.
_BATCHES_AHEAD: Final = 4

# Requests whose texts may be computed at once, of all callers and of one caller. With more, all
# requests would be late instead of some.
_TEXTS_AT_ONCE: Final = 8
_TEXTS_PER_CALLER: Final = 2


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of a request's time: the reading `at` of the monotonic `clock`, in seconds."""

    at: float
    clock: Callable[[], float] = time.monotonic

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self.at - self.clock())


class Job(QueuedJob, Generic[T]):
    """Work of one caller in a lane, or its turn there.

    Awaiting a job returns the result of its work, or None once its turn begins. Leaving its context
    gives its server back, or drops the job while it waits.

    Attributes:
        work: the work for a thread; None for a turn, and once a thread has taken it.
        future: the awaited result.
        timer: drops the job when its time is up; None if it begins at once.
        is_turn: whether the caller works itself.
        on_thread: whether a thread has the job, working or about to.
        is_working: whether the thread works, so that the job is not dropped.
        has_left: whether the caller has left, perhaps before the thread ends.
    """

    def __init__(
        self, lane: "Lane", work: Callable[[], T] | None, size: float, deadline: float
    ) -> None:
        super().__init__(size, deadline)
        self.work = work
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.is_turn = work is None
        self.on_thread = False
        self.is_working = False
        self.has_left = False
        self._lane = lane

    def __await__(self) -> Generator[Any, None, T]:
        return self.future.__await__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Give the server back, or drop the job while it waits."""
        self.has_left = True
        if self.timer is not None:
            self.timer.cancel()
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # tells asyncio that the error was seen
        self._lane.leave(self)


class Lane:
    """Turns at a scarce resource, for callers on one event loop at a time.

    Args:
        name: the resource, for messages to callers.
        servers: returns how many jobs may be under way; None: two per thread, and a job gives its
            server back when its work ends.
        threads: number of threads that work.
        clock: monotonic seconds.
        per_caller: most jobs of one caller that may be under way.
        leaves_room: see `FairQueue`.
    """

    def __init__(
        self,
        name: str,
        servers: Callable[[], int] | None = None,
        *,
        threads: int = 0,
        clock: Callable[[], float] = time.monotonic,
        per_caller: float = math.inf,
        leaves_room: bool = False,
    ) -> None:
        self._name = name
        self._clock = clock
        self._leaves_at_once = servers is None
        # Jobs that threads may still take; without threads, callers work and nothing limits them.
        # Two jobs per thread, so that a thread has its next job before the event loop has seen the
        # end of the first.
        self._free = 2 * threads if threads else math.inf
        self._queue: FairQueue[Job[Any]] = FairQueue(
            servers or (lambda: 2 * threads), clock, per_caller, leaves_room=leaves_room
        )
        self._workers = _Workers(name, threads, clock, self._end_all)

    @property
    def waiting(self) -> int:
        """Return the number of waiting jobs."""
        return self._queue.waiting

    @property
    def is_crowded(self) -> bool:
        """Return whether jobs wait because all servers are busy.

        Jobs that wait only behind jobs of their own caller do not count.
        """
        return self._queue.is_crowded

    def turn(self, caller: Hashable, size: float, deadline: Deadline) -> Job[None]:
        """Return a waiting turn; raises `QueueFull` as `FairQueue.add`.

        A turn costs the seconds for which it is held. In a lane with threads it costs as much as
        threads need for work of its size. Awaiting a turn raises `DeadlineExceeded` if its time is
        up before it begins.
        """
        return self._enter(None, caller, size, deadline)

    def work(
        self, work: Callable[[], T], caller: Hashable, size: float, deadline: Deadline
    ) -> Job[T]:
        """Return a waiting job for a thread; raises `QueueFull` as `FairQueue.add`.

        Awaiting the job raises the error of the work, or `DeadlineExceeded` if its time is up
        before it begins.
        """
        return self._enter(work, caller, size, deadline)

    def leave(self, job: Job[Any]) -> None:
        """Give the server of a job back, or drop a waiting job; a thread finishes first."""
        if job.on_thread:
            return
        if job.state == "under way" and job.is_turn and not self._workers.count:
            self._queue.charge(job, self._clock() - job.began)
        self._queue.leave(job)
        self._advance()

    def close(self) -> None:
        """Accept no new jobs; do not wait for the threads."""
        self._workers.close()

    def _enter(
        self, work: Callable[[], T] | None, caller: Hashable, size: float, deadline: Deadline
    ) -> Job[T]:
        job = Job(self, work, size, self._clock() + deadline.remaining())
        self._queue.add(job, caller)
        self._advance()
        if not job.future.done():
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(deadline.remaining(), self._give_up, job)
        return job

    def _give_up(self, job: Job[Any]) -> None:
        """Drop a job whose time is up before it works."""
        if job.is_working or job.future.done():
            return
        if not job.on_thread:
            self._queue.leave(job)
        error = DeadlineExceeded(f"the time was up before {self._name} was free")
        job.future.set_exception(error)

    def _advance(self) -> None:
        """Begin the next jobs as long as servers are free."""
        while self._free and (job := self._queue.begin()) is not None:
            if job.future.done():  # its caller is about to leave
                self._queue.leave(job, worked=False)
            elif job.is_turn:
                job.future.set_result(None)
            else:
                job.on_thread = True
                self._free -= 1
                self._workers.begin(job)

    def _end_all(self, ended: Sequence["_Ended"]) -> None:
        """Publish the outcomes of the jobs that have worked, unless their callers have left."""
        for job, result, error, seconds in ended:
            job.on_thread = False
            self._free += 1
            self._queue.charge(job, seconds)
            if self._leaves_at_once or job.has_left:
                self._queue.leave(job)
            if job.future.done():
                continue
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)
        self._advance()


class _Ended(NamedTuple):
    """A job that has worked, its result or its error, and its seconds."""

    job: Job[Any]
    result: Any
    error: BaseException | None
    seconds: float


class _Workers:
    """Threads that do the work of jobs.

    A thread starts with its first job, and finishes the work that it has begun.

    Args:
        name: prefix of the threads' names.
        count: number of threads.
        clock: monotonic seconds.
        end_all: called on the event loop with the jobs that have worked, several at once.
    """

    def __init__(
        self,
        name: str,
        count: int,
        clock: Callable[[], float],
        end_all: Callable[[Sequence[_Ended]], None],
    ) -> None:
        self.count = count
        self._clock = clock
        self._end_all = end_all
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        work = partial(_work_through, self._jobs)
        self._unstarted = [
            supervised_thread(name, work, name=f"{name}_{number}") for number in range(count)
        ]
        self._lock = threading.Lock()  # guards `_ended` and `_woken`
        self._ended: list[_Ended] = []
        # The event loop that is about to look at the jobs that have ended.
        self._woken: asyncio.AbstractEventLoop | None = None

    def begin(self, job: Job[Any]) -> None:
        """Give a job to the threads, after the event loop's current iteration.

        Until then a thread would compete with the Python code of the event loop.
        """
        if self._unstarted:
            self._unstarted.pop().start()
        loop = asyncio.get_running_loop()
        loop.call_soon(self._jobs.put, partial(self._run, job, loop))

    def close(self) -> None:
        """End each thread after its work, without waiting for it."""
        for _ in range(self.count):
            self._jobs.put(None)

    def _run(self, job: Job[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Work, on a thread, unless the caller has left or its time is up."""
        began = self._clock()
        job.is_working = not job.future.done()
        work = job.work
        job.work = None  # it holds the picture
        result, error = _outcome(work) if job.is_working else (None, None)
        del work
        with self._lock:
            self._ended.append(_Ended(job, result, error, self._clock() - began))
            is_woken = self._woken is loop
            self._woken = loop
        if not is_woken:  # else the event loop is about to look
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(self._hand_over)

    def _hand_over(self) -> None:
        """Hand over the jobs that have worked, on the event loop."""
        with self._lock:
            ended = self._ended
            self._ended = []
            self._woken = None
        self._end_all(ended)


def _work_through(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    # Do not lower the threads' priority. A thread that loses its core while it holds the
    # interpreter lock would stop all other threads.
    while (job := jobs.get()) is not None:
        job()
        del job  # it holds the answer


def _outcome(work: Callable[[], Any] | None) -> tuple[Any, BaseException | None]:
    """Return the result of work, or its error; the error's traceback does not hold the job."""
    assert work is not None, "the jobs of threads have work"
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001  raised where the job is awaited
        return None, error


class Lanes:
    """The lanes of a web process.

    Args:
        decoder_count: returns the number of decoder processes.
    """

    def __init__(
        self,
        settings: Settings,
        models: Models,
        decoder_count: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        def pictures_ahead() -> int:
            return _BATCHES_AHEAD * _batch_slots(models)

        def explanations_ahead() -> int:
            return _BATCHES_AHEAD * _batch_slots(models, MAX_EXPLANATION_BATCH)

        threads = decode_threads(settings)
        self.pictures = Lane(
            "decode", pictures_ahead, threads=threads, clock=clock, leaves_room=True
        )
        self.decoders = Lane("decoders", decoder_count, clock=clock)
        self.documents = Lane("documents", threads=1, clock=clock)
        self.drawings = Lane("drawing", threads=1, clock=clock)
        self.scores = Lane("scores", threads=1, clock=clock)
        self.texts = Lane(
            "texts", lambda: _TEXTS_AT_ONCE, clock=clock, per_caller=_TEXTS_PER_CALLER
        )
        self.explanations = Lane("explanations", explanations_ahead, clock=clock, leaves_room=True)

    def close(self) -> None:
        """Accept no new jobs; do not wait for the threads."""
        for lane in (self.pictures, self.documents, self.drawings, self.scores):
            lane.close()


def _batch_slots(models: Models, most: int | None = None) -> int:
    """Return how many pictures fit in one batch of every engine together.

    Args:
        most: limit on the pictures of a batch.
    """
    engine = models.default.current.engine
    if engine.info is None:
        return len(engine.engines)
    batch = engine.info.max_batch
    if most is not None:
        batch = min(batch, most)
    return len(engine.engines) * batch
