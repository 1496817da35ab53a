"""The images of a stream: how many are under way, and which is given out next. How they are awaited is the client's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from itertools import islice
from typing import Any, Generic, TypeVar

from vitserve.errors import ClientError

Source = TypeVar("Source")
Answer = TypeVar("Answer")
Job = TypeVar("Job", bound="Future[Any] | asyncio.Task[Any]")


class Window(Generic[Source, Job]):
    """The images that are under way or wait to be given out, each with the job that asks about it.

    Args:
        images: taken as there is room.
        begin: begins the job of an image.
        concurrency: how many jobs are worked on at once; in order, as many again may wait behind a slow one.
        ordered: give the answers in the images' order; else as they come.
    """

    def __init__(
        self, images: Iterable[Source], begin: Callable[[Source], Job], concurrency: int, ordered: bool
    ) -> None:
        self._images, self._begin, self._ordered = iter(images), begin, ordered
        self._size = 2 * concurrency if ordered else concurrency
        self._items: deque[tuple[Source, Job]] = deque()

    def fill(self) -> bool:
        """Begin as many jobs as there is room for; return whether any is left."""
        for image in islice(self._images, self._size - len(self._items)):
            self._items.append((image, self._begin(image)))
        return bool(self._items)

    def jobs(self) -> list[Job]:
        """Return the jobs of which one must be done before `pop`."""
        return [job for _, job in islice(self._items, 1 if self._ordered else None)]

    def pop(self) -> tuple[Source, Job]:
        """Take out the first image whose job is done."""
        while not self._items[0][1].done():
            self._items.rotate(-1)
        return self._items.popleft()

    def cancel(self) -> list[Job]:
        """Cancel the jobs that are left, and return them."""
        left = [job for _, job in self._items]
        for job in left:
            job.cancel()
        return left


def answer_or_error(result: Callable[[], Answer]) -> Answer | ClientError | OSError:
    """Return what `result` returns, or the error that it raises if that concerns one image alone."""
    try:
        return result()
    except (ClientError, OSError) as error:
        return error
