"""Virtual threads: greenlets, which give way to one another only where a seeded choice lets them.

`Threads` stands in for the module `threading` in the code that is simulated. A virtual thread runs until it waits: for
a condition, for another thread, or for the device. At a lock, threads of the same process may go first, as if the
kernel had preempted whoever takes or leaves it. Greenlets, as a switch between real threads takes far longer: it was a
fifth of the time of a seed.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from greenlet import greenlet

from tests.simulation.scheduler import Process, Scheduler


class Buried(BaseException):
    """Ends a thread of a process that is no more, so that nothing of it is left."""


class VirtualThread:
    """Stands in for `threading.Thread`."""

    def __init__(
        self,
        threads: Threads,
        process: Process,
        target: Callable[..., Any],
        args: Sequence[Any] = (),
        name: str = "thread",
        daemon: bool = False,
    ) -> None:
        self.name = name
        self.process = process
        self.queued = False
        self.finished = False
        self.buried = False
        self._threads = threads
        self._target = functools.partial(target, *args)
        self._greenlet: greenlet | None = None
        self._started = False
        self._waiters: list[VirtualThread] = []

    def start(self) -> None:
        self._started = True
        self._threads.living.append(self)
        self._threads.scheduler.wake(self)

    def is_alive(self) -> bool:
        return self._started and not self.finished

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end; on a virtual thread only."""
        current = self._threads.current
        assert current is not None
        assert timeout is None
        while not self.finished:
            self._waiters.append(current)
            current.pause()

    def step(self) -> bool:
        """Run to the next wait."""
        if self.finished or not (self.process.alive or self.buried):
            return False
        if self.process.frozen_until > self._threads.scheduler.now and not self.buried:
            wake = functools.partial(self._threads.scheduler.wake, self)
            self._threads.scheduler.at(self.process.frozen_until, wake)
            return False
        if self._greenlet is None:
            self._greenlet = greenlet(self._run)
        outer, self._threads.current = self._threads.current, self
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)  # a thread has none, whoever lets it run
        try:
            self._greenlet.switch()
        finally:
            asyncio._set_running_loop(loop)
            self._threads.current = outer
        return False

    def pause(self) -> None:
        """Give way; from now on this thread runs when somebody wakes it."""
        assert self._greenlet is not None
        assert self._greenlet.parent is not None
        if not self.buried:
            self._greenlet.parent.switch()
        if self.buried:
            raise Buried

    def bury(self) -> None:
        """Unwind the thread of a process that has ended."""
        self.buried = True
        while self._greenlet is not None and not self.finished:
            self.step()
        self.finished = True

    def _run(self) -> None:
        try:
            self._target()
        except Buried:
            pass
        except KeyboardInterrupt:
            raise  # to whoever let the thread run, as it is meant for the whole program
        except BaseException as error:  # noqa: BLE001  told to the simulation, as `threading.excepthook` would be
            if not self.buried:
                self._threads.on_exception(self, error)
        finally:
            self.finished = True
        for waiter in self._waiters:
            self._threads.scheduler.wake(waiter)


class Condition:
    """Stands in for `threading.Condition`; its lock is never contended, as nobody gives way while holding it."""

    def __init__(self, threads: Threads, lock: threading.Lock | None = None) -> None:
        self._threads = threads
        self._waiting: deque[VirtualThread] = deque()
        self._lock = lock or threading.Lock()

    def __enter__(self) -> Self:
        if self._threads.current is None:
            self._threads.let_others_run()
        else:
            self._threads.preempt()
        assert self._lock.acquire(blocking=False), "a lock is taken twice"
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._threads.current is None:
            self._threads.let_others_run()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified, or for `timeout` seconds."""
        assert self._lock.locked()
        threads, current = self._threads, self._threads.current
        assert current is not None, "an event loop waits for a condition"
        self._waiting.append(current)
        if timeout is not None:
            threads.scheduler.after(timeout, functools.partial(self._give_up, current))
        self._lock.release()
        try:
            current.pause()
        finally:
            assert self._lock.acquire(blocking=False), "a lock is taken twice"
            notified = current not in self._waiting
            if not notified:
                self._waiting.remove(current)
        return notified

    def _give_up(self, thread: VirtualThread) -> None:
        """Wake a thread whose time is up; one that waits again since looks once more, as after any wake-up."""
        if thread in self._waiting:
            self._threads.scheduler.wake(thread)

    def notify(self, n: int = 1) -> None:
        assert self._lock.locked()
        for _ in range(min(n, len(self._waiting))):
            self._threads.wake_soon(self._waiting.popleft())

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Threads:
    """Stands in for the module `threading`.

    Args:
        wake_delay: seconds that a notified thread takes at most to run.
        on_exception: called with a thread and what it ended with.
    """

    def __init__(
        self, scheduler: Scheduler, *, wake_delay: float, on_exception: Callable[[VirtualThread, BaseException], None]
    ) -> None:
        self.scheduler = scheduler
        self.on_exception = on_exception
        self.current: VirtualThread | None = None
        self.living: list[VirtualThread] = []
        self._wake_delay = wake_delay

    def __getattr__(self, name: str) -> Any:
        """Return what is no stand-in from the real module."""
        return getattr(threading, name)

    def Thread(self, **options: Any) -> VirtualThread:  # noqa: N802  the real module's name
        return VirtualThread(self, self.current_process(), **options)

    def Condition(self, lock: threading.Lock | None = None) -> Condition:  # noqa: N802  the real module's name
        return Condition(self, lock)

    def run_in(self, process: Process) -> None:
        """Give a process its executor, whose threads are virtual ones too."""

        def run_in_thread(work: Callable[[], Any], finish: Callable[[Any], None]) -> None:
            VirtualThread(self, process, lambda: finish(work()), name="executor").start()

        process.run_in_thread = run_in_thread

    def sleep(self, seconds: float) -> None:
        """Let virtual time pass for the current thread."""
        current = self.current
        assert current is not None
        over = False

        def wake() -> None:
            nonlocal over
            over = True
            self.scheduler.wake(current)

        self.scheduler.after(seconds, wake)
        while not over:
            current.pause()

    def wake_soon(self, thread: VirtualThread) -> None:
        """Wake a thread at once or within the wake-up delay."""
        if self._wake_delay and self.scheduler.random.random() < 0.3:
            delay = self.scheduler.random.random() * self._wake_delay
            self.scheduler.after(delay, functools.partial(self.scheduler.wake, thread))
        else:
            self.scheduler.wake(thread)

    def preempt(self) -> None:
        """Let somebody else run before the current thread goes on, if the seeded choice says so."""
        current = self.current
        assert current is not None
        if not current.buried and self.scheduler.random.random() < 0.1:
            self.scheduler.wake(current)
            current.pause()

    def let_others_run(self) -> None:
        """Run the threads of this event loop's process that can run, if the seeded choice says so."""
        if self.scheduler.random.random() < 0.3:
            process = self.current_process()
            for thread in self.living:
                if thread.queued and thread.process is process:
                    thread.step()

    def bury(self) -> None:
        """End all threads, once nothing that they do counts any more."""
        for thread in self.living:
            thread.bury()

    def current_process(self) -> Process:
        """Return the process whose code runs."""
        if self.current is not None:
            return self.current.process
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Process)
        return loop
