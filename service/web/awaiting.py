"""Awaiting several pieces of work, or one whose caller may go away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.types import Receive

from service.errors import ClientDisconnected

T = TypeVar("T")


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results, in order.

    When one fails the others are cancelled, and its error is raised only after they have ended: until then they hold
    what they were given.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        failed.__traceback__ = None  # a frame of it holds the group itself, and the tasks with all that they were given
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`; if the caller goes away meanwhile, cancel it and raise `ClientDisconnected`.

    The body that came through `receive` must have been read to its end.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watcher.result()  # raises what else may become of a request's body
        raise ClientDisconnected("the caller went away")
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            # Its permit is released only after it has let go of what it holds.
            await asyncio.wait((task,))


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
