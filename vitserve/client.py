"""A client of the service, blocking and asynchronous, with its errors and the types of its answers.

```python
with Client("http://127.0.0.1:8000") as client:
    print(client.classify("photo.jpg").predictions[0].label)
```
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
)
from typing import Any, Self

import httpx

from vitserve.documents import (
    Attention,
    AttentionDocument,
    BatchClassification,
    Classification,
    Classifications,
    FailedItem,
    ListedModel,
    ModelClassification,
    ModelDescription,
    Prediction,
    ProblemDocument,
    Timings,
)
from vitserve.errors import (
    ClientError,
    Conflict,
    DeadlineExceeded,
    Forbidden,
    ForeignAnswer,
    ImageRefused,
    InferenceFailed,
    InvalidParameter,
    InvalidRequest,
    ModelFailed,
    NotFound,
    ProblemError,
    ServiceFailed,
    Unauthorized,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from vitserve.head_documents import AddedExamples, HeadDescription
from vitserve.methods import AsyncMethods, BlockingMethods
from vitserve.pictures import ImageSource
from vitserve.proxies import Proxy, Transport, proxy_of, transport_through
from vitserve.requests import (
    Answer,
    DrawingOptions,
    MapOptions,
    Request,
    client_options,
    service_url,
)
from vitserve.retries import Retries, pause_after
from vitserve.streams import Source, answers, async_answers

__all__ = [
    "AddedExamples",
    "AsyncClient",
    "Attention",
    "AttentionDocument",
    "BatchClassification",
    "Classification",
    "Classifications",
    "Client",
    "ClientError",
    "Conflict",
    "DeadlineExceeded",
    "DrawingOptions",
    "FailedItem",
    "Forbidden",
    "ForeignAnswer",
    "HeadDescription",
    "ImageRefused",
    "ImageSource",
    "InferenceFailed",
    "InvalidParameter",
    "InvalidRequest",
    "ListedModel",
    "MapOptions",
    "ModelClassification",
    "ModelDescription",
    "ModelFailed",
    "NotFound",
    "Prediction",
    "ProblemDocument",
    "ProblemError",
    "Retries",
    "ServiceFailed",
    "Timings",
    "Unauthorized",
    "Unavailable",
    "UnknownModel",
    "Unreachable",
]

_WRONG_PATH_CODES = ("not_found", "method_not_allowed")
"""Codes of problems that may come from a path in the client's url."""

_SIDE_SECONDS = 60.0
"""Time after which a client asks again for the size of the default model's input."""

_UNSHRUNK_FILTERS = ("nearest", "box")
"""Filters that pick single pixels; shrinking would make them pick others."""


class _Service:
    """What a client knows of its service, and the parts of sending that do not wait."""

    _http: httpx.Client | httpx.AsyncClient
    _proxy: Proxy | None = None  # from the environment, unless the caller gives a transport
    _has_answered = False
    _has_succeeded = False
    # The longer side in pixels of the default model's input, and when to ask for it again.
    _side = 0.0
    _side_expires = -math.inf

    def __init__(
        self,
        url: str | httpx.URL,
        api_key: str | None,
        timeout: float | httpx.Timeout,
        retries: Retries,
        shrink: bool,
    ) -> None:
        if not isinstance(retries, Retries):
            raise TypeError(f"retries {retries!r}: expected Retries, such as Retries(tries=1)")
        self._address = service_url(url)
        self._options = client_options(self._address, api_key, timeout)
        self._retries = retries
        self._shrink = shrink

    def _transport(self, build: Callable[..., Transport]) -> Transport:
        """Return a transport through the proxy that the environment sets, if any."""
        self._proxy = proxy_of(self._address)
        return transport_through(self._proxy, build)

    def _read(self, request: Request[Answer], response: httpx.Response) -> Answer:
        self._has_answered = True
        try:
            answer = request.read(response)
        except ForeignAnswer as error:
            message = f"{error}{self._through()}{self._path_hint()}"
            raise ForeignAnswer(message, error.status, error.retry_after) from None
        except ProblemError as error:
            if error.code in _WRONG_PATH_CODES:
                error.args = (f"{error}{self._path_hint()}",)
            raise
        self._has_succeeded = True
        return answer

    def _through(self) -> str:
        """Return an addition to a message about the environment's proxy; empty without one."""
        return "" if self._proxy is None else f", through {self._proxy}; {self._proxy.remedy}"

    def _path_hint(self) -> str:
        """Return an addition to a message if the url has a path below which nothing has worked."""
        url = self._http.base_url
        if self._has_succeeded or url.path == "/":
            return ""
        address = str(url.copy_with(path="/", query=None, userinfo=b"")).rstrip("/")
        return f": pass the url of the service without the path of a request, such as {address}"

    def _pause_after(
        self, error: ClientError | httpx.TransportError, tries: int, ends_at: float
    ) -> float:
        """Return the seconds to wait before the next try.

        Raises:
            ClientError: the last try failed, or the error lasts. An error of httpx becomes
                `Unreachable`.
        """
        if isinstance(error, ClientError):
            failure = error
        else:
            failure = Unreachable(error, self._http.base_url, self._through())
        if not failure.temporary or tries >= self._retries.tries:
            raise failure
        # If the service has never answered, a refused connection suggests a wrong address rather
        # than a restart.
        if isinstance(failure, Unreachable) and failure.never_connected and not self._has_answered:
            raise failure
        pause = pause_after(failure, tries, self._retries)
        if self._retries.clock() + pause > ends_at:
            raise failure
        return pause

    def _needs_side(self) -> bool:
        return self._retries.clock() > self._side_expires

    def _keep_side(self, model: ModelDescription) -> None:
        self._side = max(model.preprocessing["resize_size"])
        if model.preprocessing.get("interpolation") in _UNSHRUNK_FILTERS:
            self._side = math.inf
        self._side_expires = self._retries.clock() + _SIDE_SECONDS


class Client(_Service, BlockingMethods):
    """A blocking client for any number of threads; as a context manager it closes its connections.

    A forked process, as of `multiprocessing`, gets connections of its own.

    Args:
        url: address of the service.
        api_key: key to send as `Authorization: Bearer`.
        timeout: seconds of silence after which a request fails.
        retries: how often and how long to repeat a request after a temporary refusal or a broken
            connection.
        shrink: whether to send large JPEG and PNG pictures smaller, without loss for the model (see
            docs/api.md); needs Pillow.
        transport: a transport of httpx instead of one that HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and
            NO_PROXY configure.
        sleep: function that waits between two tries.

    A method raises `ProblemError` if the service refuses the request, `Unreachable` if nothing
    answers, or another `ClientError`. A method that reads a file raises `OSError` if it cannot.
    """

    _http: httpx.Client

    def __init__(
        self,
        url: str | httpx.URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 30,
        retries: Retries = Retries(),
        shrink: bool = False,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(url, api_key, timeout, retries, shrink)
        self._given_transport = transport
        self._connect()
        self._sleep = sleep

    def _connect(self) -> None:
        """Begin without connections, in this process."""
        transport = self._given_transport or self._transport(httpx.HTTPTransport)
        self._http = httpx.Client(transport=transport, **self._options)
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def stream(
        self, images: Iterable[Source], ask: Callable[[Source], Answer], *, concurrency: int = 8
    ) -> Iterator[tuple[Source, Answer | ClientError | OSError]]:
        """Ask about any number of images, several at once; yield each with its answer or error.

        The images keep their order. Memory is bounded: at most twice `concurrency` images are taken
        from `images` before their answers are yielded. If the caller stops early, the generator
        waits for the requests that are on their way.

        Args:
            images: the images, or anything else that `ask` takes.
            ask: a method of this client, or a function that calls some; runs in several threads.
            concurrency: number of simultaneous requests, at least 1.
        """
        return answers(images, ask, concurrency)

    @staticmethod
    def _sender(build: Callable[..., Request[Any]]) -> Callable[..., Any]:
        def send(self: Client, *arguments: Any, **options: Any) -> Any:
            return self._send(build(self, *arguments, **options))

        return send

    def _send(self, request: Request[Answer]) -> Answer:
        if os.getpid() != self._process:
            # A forked process would read the answers of its parent's requests.
            self._connect()
        if self._shrink and request.can_shrink:
            if self._needs_side():
                self._keep_side(self.model())
            request = request.shrunk(self._side)
        tries = 0
        ends_at = self._retries.clock() + self._retries.seconds
        while True:
            tries += 1
            try:
                response = self._http.request(request.method, request.path, **request.options)
                return self._read(request, response)
            except (ClientError, httpx.TransportError) as error:
                pause = self._pause_after(error, tries, ends_at)
            self._sleep(pause)


class AsyncClient(_Service, AsyncMethods):
    """An asynchronous client with the arguments, methods and errors of `Client`.

    Each event loop gets connections of its own.
    """

    _http: httpx.AsyncClient

    def __init__(
        self,
        url: str | httpx.URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 30,
        retries: Retries = Retries(),
        shrink: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        super().__init__(url, api_key, timeout, retries, shrink)
        self._given_transport = transport
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connect()
        self._sleep = sleep

    def _connect(self) -> None:
        """Begin without connections."""
        transport = self._given_transport or self._transport(httpx.AsyncHTTPTransport)
        self._http = httpx.AsyncClient(transport=transport, **self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def stream(
        self,
        images: Iterable[Source] | AsyncIterable[Source],
        ask: Callable[[Source], Coroutine[Any, Any, Answer]],
        *,
        concurrency: int = 8,
    ) -> AsyncIterator[tuple[Source, Answer | ClientError | OSError]]:
        """Like `Client.stream`, with a coroutine function `ask`; images may come asynchronously.

        Closing the iterator cancels the requests that are on their way.
        """
        return async_answers(images, ask, concurrency)

    @staticmethod
    def _sender(build: Callable[..., Request[Any]]) -> Callable[..., Any]:
        async def send(self: AsyncClient, *arguments: Any, **options: Any) -> Any:
            # In a thread, because this reads files and encodes pictures.
            request = await asyncio.to_thread(build, self, *arguments, **options)
            return await self._send(request)

        return send

    async def _send(self, request: Request[Answer]) -> Answer:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            self._connect()  # connections belong to one event loop
        self._loop = loop
        if self._shrink and request.can_shrink:
            if self._needs_side():
                self._keep_side(await self.model())
            request = await asyncio.to_thread(request.shrunk, self._side)
        tries = 0
        ends_at = self._retries.clock() + self._retries.seconds
        while True:
            tries += 1
            try:
                response = await self._http.request(request.method, request.path, **request.options)
                return self._read(request, response)
            except (ClientError, httpx.TransportError) as error:
                pause = self._pause_after(error, tries, ends_at)
            await self._sleep(pause)
