"""Streams of requests: pictures in, pairs of a picture and its answer out, in order."""

import asyncio
import inspect
import itertools
from collections import deque
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from vitserve.errors import ClientError
from vitserve.pictures import require_several
from vitserve.requests import Answer

Source = TypeVar("Source")


def answers(
    images: Iterable[Source], ask: Callable[[Source], Answer], concurrency: int
) -> Iterator[tuple[Source, Answer | ClientError | OSError]]:
    """Yield each image with its answer; see `vitserve.client.Client.stream`."""
    _check(images, concurrency)
    if isinstance(images, AsyncIterable):
        raise TypeError("expected an iterable of pictures: AsyncClient takes asynchronous ones")
    remaining = iter(images)
    jobs = deque[tuple[Source, Future[Answer]]]()
    pool = ThreadPoolExecutor(concurrency)
    try:
        while True:
            next_images = itertools.islice(remaining, 2 * concurrency - len(jobs))
            jobs.extend((image, pool.submit(ask, image)) for image in next_images)
            if not jobs:
                return
            image, job = jobs.popleft()
            answer = _answer_or_error(job.result)
            if inspect.iscoroutine(answer):
                answer.close()
                raise TypeError("`ask` is a coroutine function: pass it to AsyncClient.stream")
            yield image, answer
    finally:
        pool.shutdown(cancel_futures=True)


async def async_answers(
    images: Iterable[Source] | AsyncIterable[Source],
    ask: Callable[[Source], Coroutine[Any, Any, Answer]],
    concurrency: int,
) -> AsyncIterator[tuple[Source, Answer | ClientError | OSError]]:
    """Yield each image with its answer; see `vitserve.client.AsyncClient.stream`."""
    _check(images, concurrency)
    permits = asyncio.Semaphore(concurrency)
    room = asyncio.Semaphore(2 * concurrency - 1)  # for images after the first one
    jobs = asyncio.Queue[tuple[Source, asyncio.Task[Answer]] | None]()
    tasks: list[asyncio.Task[Any]] = []

    async def bounded(image: Source) -> Answer:
        async with permits:
            job = ask(image)
            if not inspect.isawaitable(job):
                raise TypeError("`ask` is not a coroutine function: pass a method of AsyncClient")
            return await job

    async def begin_jobs() -> None:
        try:
            async for image in _asynchronous(images):
                task = asyncio.create_task(bounded(image))
                tasks.append(task)
                jobs.put_nowait((image, task))
                await room.acquire()
        finally:
            jobs.put_nowait(None)

    beginning = asyncio.create_task(begin_jobs())
    tasks.append(beginning)
    try:
        while job := await jobs.get():
            image, task = job
            await asyncio.wait([task])
            tasks.remove(task)
            yield image, _answer_or_error(task.result)
            room.release()
        await beginning  # raises the error of the images
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _asynchronous(
    images: Iterable[Source] | AsyncIterable[Source],
) -> AsyncIterator[Source]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
    else:
        for image in images:
            yield image


def _check(images: object, concurrency: int) -> None:
    """Raise `TypeError` or `ValueError` for wrong arguments of a stream."""
    require_several(images)
    if not isinstance(concurrency, int) or concurrency < 1:
        raise ValueError(f"concurrency {concurrency!r}: expected an integer of at least 1")


def _answer_or_error(result: Callable[[], Answer]) -> Answer | ClientError | OSError:
    """Return the result, or the error that it raises if the error concerns only one image."""
    try:
        return result()
    except (ClientError, OSError) as error:
        return error
