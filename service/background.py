"""Runs the background tasks and threads of the service: what fails is logged, counted and started
again.

By themselves a failed task of asyncio and a failed thread are gone, mostly without a word, and the
service goes on without what they did: signs of life, timeouts of connections, new heads. So nothing
else in `service` starts either, but for tasks and threads of one request, whose errors are its
answer.
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

# Seconds before the first restart; each further pause is twice as long. A run of
# `_LONG_RUN_SECONDS` starts over.
_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_LONG_RUN_SECONDS: Final = 60.0

_observers: list[Callable[[str], object]] = []


def on_restart(called: Callable[[str], object]) -> None:
    """Call a function with a task's name whenever this process starts it again, instead of the one
    before.
    """
    _observers[:] = [called]


class Restarts:
    """The restarts of one task.

    Args:
        task: its name, in the log and the metric.
        clock: monotonic seconds.
    """

    def __init__(self, task: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._task = task
        self._clock = clock
        self._started = clock()
        self._pause_seconds = _PAUSE_SECONDS

    def begin(self) -> None:
        """Note that a run begins."""
        self._started = self._clock()

    def failed(self, error: BaseException) -> float:
        """Log and count a run that failed, and return the seconds until the next one."""
        if self._clock() - self._started >= _LONG_RUN_SECONDS:
            self._pause_seconds = _PAUSE_SECONDS
        pause = self._pause_seconds
        self._pause_seconds = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        logger.error(
            "background task %s failed: it is started again in %g s",
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
    """Start a coroutine as a task, again whenever it fails, until it returns or the task is
    cancelled.

    Args:
        task: its name, in the log and the metric.
        work: returns the coroutine of a run.
        sleep: waits some seconds.
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
            pause = restarts.failed(error)  # another task was cancelled, which the work awaited
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
    """Return a daemon thread, not started yet, that does its work again whenever that fails, until
    it returns.

    Args:
        task: its name in the log and the metric.
        work: a run.
        name: of the thread, if it differs.
        sleep: waits some seconds.
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
    """Tasks that run once and are kept until they end: an event loop alone holds none.

    Whoever awaits one gets its error; one that is no answer to a caller is logged too, as nobody
    may await it.
    """

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a coroutine and return its task; nobody has to wait for it."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel those that have not ended."""
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
