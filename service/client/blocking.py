"""The blocking client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
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


class Client:
    """A blocking client, for as many threads as like; use it as a context manager so that its connections are closed.

    Args:
        url: of the service.
        api_key: sent as `Authorization: Bearer`.
        timeout: seconds of silence after which a request is given up.
        retries: how often and how long a refusal for the moment, or a broken connection, is tried again.
        sleep: waits between two tries.

    Every method raises a `ClientError` when there is no answer: of the type `ProblemError` when the service refuses,
    `Unreachable` when it cannot be reached. One that reads a file raises `OSError` when it cannot.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 30,
        retries: Retries = Retries(),  # noqa: B008  it is immutable
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._http = httpx.Client(base_url=url, transport=transport, **requests.connection(api_key, timeout))
        self._retries, self._sleep = retries, sleep
        self._answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def classify(
        self, image: ImageSource, *, top_k: int | None = None, attention: WithAttention = False
    ) -> Classification:
        """Classify one image; with `attention`, add the map that /classify offers under this name."""
        return self._send(requests.classify(image, top_k, attention))

    def classify_batch(
        self, images: Sequence[ImageSource], *, top_k: int | None = None, attention: WithAttention = False
    ) -> BatchClassification:
        """Classify several images; the results are in their order, each an answer or an error of its own."""
        return self._send(requests.classify_batch(images, top_k, attention))

    def attention(self, image: ImageSource | Classification, **options: Unpack[MapOptions]) -> list[AttentionDocument]:
        """Return the map of each class that is asked for, of the best one if none is, with its facts.

        Of a `Classification`, the maps are those of its picture, which is not sent again.
        """
        return self._send(requests.attention(image, options))

    def attention_array(self, image: ImageSource | Classification, **options: Unpack[MapOptions]) -> Array:
        """Return a map as float32 [rows, columns], or [maps, rows, columns] for several classes."""
        return self._send(requests.attention_array(image, options))

    def heat_map(self, image: ImageSource | Classification, **options: Unpack[DrawingOptions]) -> bytes:
        """Return a map drawn as PNG."""
        return self._send(requests.heat_map(image, options))

    def model(self) -> ModelDescription:
        """Describe the model that is served."""
        return self._send(requests.model())

    def labels(self) -> list[str]:
        """List the classes, in index order."""
        return self._send(requests.labels())

    def stream(
        self,
        images: Iterable[_Source],
        ask: Callable[[_Source], _Answer],
        *,
        concurrency: int = 8,
        ordered: bool = True,
    ) -> Iterator[tuple[_Source, _Answer | ClientError | OSError]]:
        """Ask about any number of images, several at a time, and give each with its answer or its error.

        Images are taken from `images` as there is room, and never more than twice `concurrency` of them are under way
        or wait to be given out, so memory is bounded. An iteration that is left early waits for the requests under way.

        Args:
            ask: a method of this client, or a function that calls some; it runs in several threads.
            concurrency: how many requests are under way at once, at least 1.
            ordered: give the answers in the images' order; else as they come.
        """
        remaining = iter(images)
        window = 2 * concurrency if ordered else concurrency
        waiting: deque[tuple[_Source, Future[_Answer]]] = deque()
        with ThreadPoolExecutor(concurrency) as pool:
            try:
                while True:
                    for image in islice(remaining, window - len(waiting)):
                        waiting.append((image, pool.submit(ask, image)))
                    if not waiting:
                        return
                    if not ordered:
                        wait([future for _, future in waiting], return_when=FIRST_COMPLETED)
                        while not waiting[0][1].done():
                            waiting.rotate(-1)
                    image, future = waiting.popleft()
                    found = answer_or_error(future.result)
                    yield image, found
            finally:
                pool.shutdown(cancel_futures=True)

    def _send(self, request: Request[_Answer]) -> _Answer:
        attempts = self._retries.begin()
        while True:
            try:
                return request.read(self._response(request))
            except ClientError as error:
                pause = attempts.pause_after(error, answered_before=self._answered)
                if pause is None:
                    raise
            self._sleep(pause)

    def _response(self, request: Request[Any]) -> httpx.Response:
        try:
            response = self._http.request(request.method, request.path, **request.options)
        except httpx.TransportError as error:
            raise Unreachable(error) from error
        self._answered = True
        return response
