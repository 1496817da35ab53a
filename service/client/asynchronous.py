"""The asynchronous client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from itertools import islice
from typing import Any, Self, TypeVar, Unpack

import httpx

from service.client import requests
from service.client.errors import ClientError, Unreachable, answer_or_error
from service.client.requests import Array, DrawingOptions, ImageSource, MapOptions, Request, WithAttention
from service.client.retries import Retries
from service.schemas import AttentionDocument, BatchClassification, Classification, ModelDescription

_Answer = TypeVar("_Answer")
_Source = TypeVar("_Source")


class AsyncClient:
    """An asynchronous client with the arguments, the methods and the errors of `Client`."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 30,
        retries: Retries = Retries(),  # noqa: B008  it is immutable
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, transport=transport, **requests.connection(api_key, timeout))
        self._retries, self._sleep = retries, sleep
        self._answered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def classify(
        self, image: ImageSource, *, top_k: int | None = None, attention: WithAttention = False
    ) -> Classification:
        """Classify one image; with `attention`, add the map that /classify offers under this name."""
        return await self._send(await asyncio.to_thread(requests.classify, image, top_k, attention))

    async def classify_batch(
        self, images: Sequence[ImageSource], *, top_k: int | None = None, attention: WithAttention = False
    ) -> BatchClassification:
        """Classify several images; the results are in their order, each an answer or an error of its own."""
        return await self._send(await asyncio.to_thread(requests.classify_batch, images, top_k, attention))

    async def attention(
        self, image: ImageSource | Classification, **options: Unpack[MapOptions]
    ) -> list[AttentionDocument]:
        """Return the map of each class that is asked for, of the best one if none is, with its facts.

        Of a `Classification`, the maps are those of its picture, which is not sent again.
        """
        return await self._send(await asyncio.to_thread(requests.attention, image, options))

    async def attention_array(self, image: ImageSource | Classification, **options: Unpack[MapOptions]) -> Array:
        """Return a map as float32 [rows, columns], or [maps, rows, columns] for several classes."""
        return await self._send(await asyncio.to_thread(requests.attention_array, image, options))

    async def heat_map(self, image: ImageSource | Classification, **options: Unpack[DrawingOptions]) -> bytes:
        """Return a map drawn as PNG."""
        return await self._send(await asyncio.to_thread(requests.heat_map, image, options))

    async def model(self) -> ModelDescription:
        """Describe the model that is served."""
        return await self._send(requests.model())

    async def labels(self) -> list[str]:
        """List the classes, in index order."""
        return await self._send(requests.labels())

    async def stream(
        self,
        images: Iterable[_Source],
        ask: Callable[[_Source], Coroutine[Any, Any, _Answer]],
        *,
        concurrency: int = 8,
        ordered: bool = True,
    ) -> AsyncIterator[tuple[_Source, _Answer | ClientError | OSError]]:
        """Ask about any number of images, several at a time, and give each with its answer or its error.

        Images are taken from `images` as there is room, and never more than twice `concurrency` of them are under way
        or wait to be given out, so memory is bounded. Closing the iterator ends the requests under way.

        Args:
            ask: a method of this client, or a coroutine function that calls some.
            concurrency: how many requests are under way at once, at least 1.
            ordered: give the answers in the images' order; else as they come.
        """
        remaining = iter(images)
        window = 2 * concurrency if ordered else concurrency
        room = asyncio.Semaphore(concurrency)
        waiting: deque[tuple[_Source, asyncio.Task[_Answer]]] = deque()

        async def bounded(image: _Source) -> _Answer:
            async with room:
                return await ask(image)

        try:
            while True:
                for image in islice(remaining, window - len(waiting)):
                    waiting.append((image, asyncio.create_task(bounded(image))))
                if not waiting:
                    return
                await asyncio.wait(
                    [task for _, task in islice(waiting, 1 if ordered else None)], return_when=asyncio.FIRST_COMPLETED
                )
                while not waiting[0][1].done():
                    waiting.rotate(-1)
                image, task = waiting.popleft()
                found = answer_or_error(task.result)
                yield image, found
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

    async def _send(self, request: Request[_Answer]) -> _Answer:
        attempts = self._retries.begin()
        while True:
            try:
                return request.read(await self._response(request))
            except ClientError as error:
                pause = attempts.pause_after(error, answered_before=self._answered)
                if pause is None:
                    raise
            await self._sleep(pause)

    async def _response(self, request: Request[Any]) -> httpx.Response:
        try:
            response = await self._http.request(request.method, request.path, **request.options)
        except httpx.TransportError as error:
            raise Unreachable(error) from error
        self._answered = True
        return response
