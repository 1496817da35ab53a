"""Virtual time: one scheduler runs the event loops and threads of all simulated processes, one step at a time.

    Scheduler -- steps --> Process (an asyncio event loop; one iteration a step)
              -- steps --> VirtualThread (up to its next wait)
              -- timers -> messages that arrive, sleeps that end, faults of the plan

While anything can run, time stands still and a seeded choice says who goes next; then the clock jumps to the next
timer. So a second of virtual time costs nothing, and the same seed gives the same order of everything.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

_STEPS_AT_ONE_MOMENT = 20_000
_STEPS_TO_UNWIND = 20


class Violation(AssertionError):
    """An invariant does not hold."""


class Actor(Protocol):
    """What the scheduler runs step by step; `queued` is the scheduler's own mark."""

    queued: bool

    def step(self) -> bool:
        """Run for one step, and return whether there is more to run at this moment."""


class Scheduler:
    """The clock, the timers, the choice of who runs next, and the first violation that anything found.

    Timers go off at multiples of `grid` seconds, or when they are due if that is 0: on a grid much happens at once.

    Attributes:
        now: virtual seconds.
        random: the seeded source of every choice.
        trace: what happened, one line each; None when nobody asked for it.
    """

    def __init__(self, seed: int, *, grid: float = 0.0, trace: bool = False) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 100.0
        self.processes = 0
        self.trace: list[str] | None = [] if trace else None
        self.violation: Violation | None = None
        self.on_quiet: Callable[[], None] = lambda: None
        self._grid = grid
        self._steps = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._runnable: list[Actor] = []

    def note(self, *what: object) -> None:
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{(self.now - 100.0) * 1000:10.3f} ms  " + " ".join(map(str, what)))

    def violate(self, *what: object) -> None:
        """Remember that an invariant is broken; the run ends with the first such."""
        message = " ".join(map(str, what))
        self.note("VIOLATION:", message)
        self.violation = self.violation or Violation(f"at {(self.now - 100.0) * 1000:.3f} ms: {message}")

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at a moment of virtual time, at once if that has passed."""
        if self._grid:
            when = max(when, math.ceil(when / self._grid) * self._grid)
        heapq.heappush(self._timers, (when, next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some seconds."""
        self.at(self.now + seconds, action)

    def wake(self, actor: Actor) -> None:
        """Let an actor run at this moment."""
        if not actor.queued:
            actor.queued = True
            self._runnable.append(actor)

    def run(self, done: Callable[[], bool], *, until: float) -> None:
        """Run until `done`; raises `Violation` when an invariant breaks, or when that is not reached by `until`."""
        while not done():
            self._run_moment()
            self.on_quiet()
            if done():
                break
            if not self._timers or self._timers[0][0] > until:
                self.violate("no progress: what was awaited has not happened")
            if self.violation is not None:
                break
            self._advance()
        if self.violation is not None:
            raise self.violation

    def _run_moment(self) -> None:
        """Run all that can run before time goes on, in an order of choice."""
        choose, runnable = self.random.random, self._runnable
        while runnable and self.violation is None:
            index = int(choose() * len(runnable))
            actor = runnable[index]
            runnable[index] = runnable[-1]
            runnable.pop()
            actor.queued = False
            if actor.step():
                self.wake(actor)
            self._steps += 1
            if self._steps > _STEPS_AT_ONE_MOMENT:
                self.violate("no progress: work without end at one moment")

    def _advance(self) -> None:
        """Let the clock jump to the next timer, and do what is due then."""
        when = self._timers[0][0]
        if when > self.now:
            self.now, self._steps = when, 0
        while self._timers and self._timers[0][0] <= self.now:
            heapq.heappop(self._timers)[2]()
            self._steps += 1
            if self._steps > _STEPS_AT_ONE_MOMENT:
                return


class _Task(asyncio.Task[Any]):
    """A task with a hash of its own: asyncio keeps tasks in sets, whose order would follow memory addresses."""

    def __init__(self, *arguments: Any, identity: tuple[int, ...], **options: Any) -> None:
        self._hash = hash(identity)
        super().__init__(*arguments, **options)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other


# Untyped: the simulation needs a few of its many methods, and those with what the service gives them.
_EventLoop: Any = asyncio.AbstractEventLoop


class Process(_EventLoop):  # type: ignore[misc]
    """A simulated process: an event loop that runs in virtual time until the process ends or is killed.

    A process that ended never runs again, nor do its threads: no `finally` of a killed process is executed.

    Attributes:
        index: the number of the engine or worker that it runs.
        killed: whether it was ended by force.
        stalled_until: when its event loop, which is busy with something else, goes on.
        frozen_at, frozen_until: when it was stopped last, threads and all, and when it goes on.
    """

    def __init__(self, scheduler: Scheduler, name: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.index = 0
        self.number = scheduler.processes = scheduler.processes + 1
        self.queued = False
        self.alive = True
        self.killed = False
        self.stalled_until = self.frozen_at = self.frozen_until = 0.0
        self.signal_handlers: dict[int, Callable[[], None]] = {}
        self.on_end: list[Callable[[], None]] = []
        self.run_in_thread: Callable[[Callable[[], Any], Callable[[Any], None]], None] | None = None
        self._ready: deque[asyncio.Handle] = deque()
        # Kept, so that no task of a process that was killed is collected, which would run its `finally`.
        self._tasks: list[asyncio.Task[Any]] = []

    # What the simulation does with it.

    def step(self) -> bool:
        """Run one iteration of the event loop."""
        resumes_at = max(self.stalled_until, self.frozen_until)
        if resumes_at > self.scheduler.now:
            self.scheduler.at(resumes_at, functools.partial(self.scheduler.wake, self))
            return False
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                if not self.alive:
                    break
                handle = self._ready.popleft()
                if not handle._cancelled:
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
        return self.alive and bool(self._ready)

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine as a task, from outside of the process."""
        self.call_soon(lambda: self.create_task(coroutine).add_done_callback(self._on_done))

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        if self.alive and not task.cancelled() and task.exception() is not None:
            self.scheduler.violate(f"{self.name} ends with {task.exception()!r}")

    def signal(self, number: int) -> None:
        """Send a signal; one without a handler is ignored."""
        if number in self.signal_handlers:
            self.call_soon(self.signal_handlers[number])

    def end(self) -> None:
        """End the process where it stands, as SIGKILL and exit do."""
        if self.alive:
            self.alive = False
            for callback in self.on_end:
                callback()

    def bury(self) -> None:
        """Unwind the tasks that are left, once nothing that they do counts any more."""
        self.alive, self.stalled_until, self.frozen_until = True, 0.0, 0.0
        for task in self._tasks:
            task.cancel()
        for _ in range(_STEPS_TO_UNWIND):
            self.step()
        self.alive = False

    # What asyncio and the service ask of an event loop.

    def time(self):
        return self.scheduler.now

    def get_debug(self):
        return False

    def is_running(self):
        return self.alive

    def is_closed(self):
        return not self.alive

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        if self.alive:
            self._ready.append(handle)
            if not self.queued:
                self.scheduler.wake(self)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay, callback, *args, context=None):
        return self.call_at(self.scheduler.now + delay, callback, *args, context=context)

    def call_at(self, when, callback, *args, context=None):
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.scheduler.at(when, functools.partial(self._fire, handle))
        return handle

    def _fire(self, handle: asyncio.TimerHandle) -> None:
        if self.alive and not handle.cancelled():
            self._ready.append(handle)
            self.scheduler.wake(self)

    def _timer_handle_cancelled(self, handle):
        """Do nothing: a timer that was cancelled is passed over when its time comes."""

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coro, *, name=None, context=None):
        identity = self.scheduler.seed, self.number, len(self._tasks)
        task = _Task(coro, loop=self, name=name or "task", context=context, identity=identity)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor, func, *args):
        future = self.create_future()

        def finish(result: Any) -> None:
            if not future.done():
                future.set_result(result)

        assert self.run_in_thread is not None
        self.run_in_thread(functools.partial(func, *args), lambda result: self.call_soon_threadsafe(finish, result))
        return future

    def add_signal_handler(self, sig, callback, *args):
        self.signal_handlers[sig] = functools.partial(contextvars.copy_context().run, callback, *args)

    async def create_unix_connection(self, protocol_factory, path=None, *, sock=None, **options):
        return await sock.open(self, protocol_factory)

    async def create_unix_server(self, protocol_factory, path=None, *, sock=None, **options):
        return sock.serve(self, protocol_factory)

    def call_exception_handler(self, context):
        error = context.get("exception")
        self.scheduler.violate(f"{self.name}: {context['message']}: {error!r}")

    def default_exception_handler(self, context):
        self.call_exception_handler(context)
