"""Run coroutines of one request side by side."""

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from model.errors import ImageError
from service.errors import ServiceError

T = TypeVar("T")
R = TypeVar("R")


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results, in order.

    When a coroutine fails, the others are cancelled. Its error is raised after they have ended,
    because until then they hold memory of the request.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        # A frame of the traceback holds the group, and so the tasks with all their arguments.
        failed.__traceback__ = None
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def of_each(handle: Callable[[T], Coroutine[Any, Any, R]], pictures: Sequence[T]) -> list[R]:
    """Like `all_of`, once per picture; an error names the picture's position among several."""

    async def handle_one(position: int, picture: T) -> R:
        try:
            return await handle(picture)
        except (ImageError, ServiceError) as error:
            if len(pictures) == 1:
                raise
            named = copy.copy(error)  # the same error may be raised for each picture of a batch
            named.args = (f"picture {position}: {error}",)
            raise named from None

    return await all_of(handle_one(*numbered) for numbered in enumerate(pictures))
