"""Runs background tasks and threads; logs, counts and restarts failed ones.

Without it, a failed asyncio task or thread would end silently, and the service would lose its work:
heartbeats, timeouts of connections, new heads. Tasks and threads that are started elsewhere report
their errors themselves: in the answer of a request, or as the state of an engine or a server.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar

from model.errors import VitError
from service.errors import ServiceError

logger = logging.getLogger("vitserve")

T = TypeVar("T")

# Pause before the first restart; each further pause is twice as long. A run of at least
# `_LONG_RUN_SECONDS` resets the pause.
_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_LONG_RUN_SECONDS: Final = 60.0

_observers: list[Callable[[str], object]] = []


def on_restart(observer: Callable[[str], object]) -> None:
    """Call a function with the name of each task that restarts; replaces the previous observer."""
    _observers[:] = [observer]


class Restarts:
    """The restarts of one task.

    Args:
        task: name in the log and the metric.
        clock: monotonic clock in seconds.
    """

    def __init__(self, task: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._clock = clock
        self._started = clock()
        self._pause_seconds = _PAUSE_SECONDS

    def begin(self) -> None:
        """Note the start of a run."""
        self._started = self._clock()

    def failed(self, error: BaseException) -> float:
        """Log and count a failed run; return the pause before the next run, in seconds."""
        if self._clock() - self._started >= _LONG_RUN_SECONDS:
            self._pause_seconds = _PAUSE_SECONDS
        pause = self._pause_seconds
        self._pause_seconds = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        logger.error(
            "background task %s failed: it restarts in %g s",
            self._task,
            pause,
            exc_info=error,
        )
        for observer in _observers:
            observer(self._task)
        return pause


def keep_running(
    task: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> asyncio.Task[None]:
    """Start a task that repeats its work after each failure, until the work returns.

    Args:
        task: name in the log and the metric.
        work: returns the coroutine of a run.
        sleep: waits for a number of seconds.
    """
    return asyncio.create_task(_run_again(work, Restarts(task), sleep), name=task)


async def _run_again(
    work: Callable[[], Coroutine[Any, Any, None]],
    restarts: Restarts,
    sleep: Callable[[float], Awaitable[None]],
) -> None:
    while True:
        restarts.begin()
        try:
            await work()
            return
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            pause = restarts.failed(error)  # the work awaited another task that was cancelled
        except Exception as error:  # noqa: BLE001  logged by `failed`
            pause = restarts.failed(error)
        await sleep(pause)


def supervised_thread(
    task: str,
    work: Callable[[], None],
    *,
    name: str = "",
    sleep: Callable[[float], None] = time.sleep,
) -> threading.Thread:
    """Return an unstarted daemon thread that repeats its work after each failure.

    Args:
        task: name in the log and the metric.
        work: function of a run.
        name: name of the thread, if it differs.
        sleep: waits for a number of seconds.
    """

    def run() -> None:
        restarts = Restarts(task)
        while True:
            restarts.begin()
            try:
                work()
                return
            except Exception as error:  # noqa: BLE001  logged by `failed`
                pause = restarts.failed(error)
            sleep(pause)

    return threading.Thread(target=run, name=name or task, daemon=True)


class Tasks:
    """Holds tasks until they end, because an event loop has only weak references to them.

    An awaited task raises its error. Unexpected errors are also logged, because the task may not be
    awaited.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine, and return its task; it need not be awaited."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all running tasks."""
        for task in self._running:
            task.cancel()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not isinstance(error, VitError | ServiceError):
            work = getattr(task.get_coro(), "__qualname__", "unknown")
            logger.error("background task %s failed", work, exc_info=error)
