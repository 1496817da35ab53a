"""The client of the service, blocking and asynchronous, on httpx; its errors, and the types of its
answers.

```python
with Client("http://127.0.0.1:8000") as client:
    print(client.classify("photo.jpg").predictions[0].label)
```
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import wraps
from types import MethodType
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, Unpack, overload
from urllib.parse import quote

import httpx

from vitserve import requests
from vitserve.documents import (
    AddedExamples,
    Attention,
    AttentionDocument,
    BatchClassification,
    Classification,
    Classifications,
    FailedItem,
    HeadDescription,
    Labels,
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
from vitserve.proxies import Proxy, proxy_of, transport_through
from vitserve.requests import (
    Answer,
    Array,
    DrawingOptions,
    ImageSource,
    MapOptions,
    Request,
    WithAttention,
)

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

_Arguments = ParamSpec("_Arguments")
Source = TypeVar("Source")

# The parameter `pool` of /embed.
Pooling = Literal["head", "cls", "mean", "transfer"]


# Seconds, unless the service asks for more.
# Codes of problems that a wrong path below the url has.
_OF_PATHS = ("not_found", "method_not_allowed")
_LONGEST_PAUSE = 8.0

# How long a model's size is taken for known, in seconds: another model may be served then.
_SIDE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Retries:
    """How often a client sends a request that was refused for the moment, or whose connection
    broke.

    Attributes:
        tries: how often a request is sent at most; 1 never sends one again.
        seconds: from the first try to the beginning of the last. A pause that would end later is
        not begun.
        first_pause: seconds after the first try; the pause doubles with every try.
        clock: seconds, from any moment on.
        jitter: a number in [0, 1), so that callers refused at the same time do not come back at the
        same time.
    """

    tries: int = 5
    seconds: float = 60.0
    first_pause: float = 0.25
    clock: Callable[[], float] = time.monotonic
    jitter: Callable[[], float] = random.random


class _Method(Generic[_Arguments, Answer]):
    """A method of both clients, written as the function that returns its request: one sends it, the
    other awaits it.

    Where it says `Request[T]`, a caller of `Client` gets a T, and one of `AsyncClient` awaits it.
    """

    def __init__(self, build: Callable[Concatenate[Any, _Arguments], Request[Answer]]) -> None:
        self._build = build

    @overload
    def __get__(
        self, client: Client | None, kind: type[Client]
    ) -> Callable[_Arguments, Answer]: ...

    @overload
    def __get__(
        self, client: AsyncClient | None, kind: type[AsyncClient]
    ) -> Callable[_Arguments, Coroutine[Any, Any, Answer]]: ...

    def __get__(
        self, client: Client | AsyncClient | None, kind: type[Client | AsyncClient]
    ) -> Callable[..., Any]:
        function = wraps(self._build)(kind._sender(self._build))
        return function if client is None else MethodType(function, client)


class _Service:
    """The methods of both clients, and what they know of the service."""

    _retries: Retries
    _http: httpx.Client | httpx.AsyncClient
    # Of the environment; none where the caller gives a transport.
    _proxy: Proxy | None = None
    _answered = False
    _succeeded = False
    _shrink: bool
    # The longer side in pixels of what the service resizes pictures to, and until when it is taken
    # for that.
    _side, _side_until = 0, -math.inf

    @_Method
    def classify(
        self,
        image: ImageSource,
        *,
        top_k: int | None = None,
        attention: WithAttention = False,
        embedding: bool | None = None,
        labels: Sequence[str] | None = None,
        model: str | None = None,
        min_score: float | None = None,
    ) -> Request[Classification]:
        """Classify one image; `attention` adds the map of that name, `embedding` what the head
        reads.

        A model with a text tower takes `labels` in place of its classes. `model` names one of
        `models`, by default the default one. Classes below `min_score` are left out.
        """
        asked = requests.query(
            top_k=top_k,
            attention=attention,
            embedding=embedding,
            labels=labels,
            model=model,
            min_score=min_score,
        )
        return Request(
            "POST", "/classify", Classification.model_validate_json, requests.body(image) | asked
        )

    @_Method
    def classify_by(
        self,
        image: ImageSource,
        models: Sequence[str] = ("*",),
        *,
        top_k: int | None = None,
        attention: WithAttention = False,
        min_score: float | None = None,
    ) -> Request[Classifications]:
        """Classify one image by several models, by default all: each has an answer or an error of
        its own.
        """
        asked = requests.query(
            top_k=top_k, attention=attention, model=",".join(models), min_score=min_score
        )
        # One name, with a comma behind it, is several that are one.
        asked["params"]["model"] += "" if len(models) > 1 or models[0] == "*" else f",{models[0]}"
        return Request(
            "POST", "/classify", Classifications.model_validate_json, requests.body(image) | asked
        )

    @_Method
    def classify_batch(
        self,
        images: Sequence[ImageSource],
        *,
        top_k: int | None = None,
        attention: WithAttention = False,
        labels: Sequence[str] | None = None,
        model: str | None = None,
    ) -> Request[BatchClassification]:
        """Classify several images; the results are in their order, each an answer or an error of
        its own.
        """
        return Request(
            "POST",
            "/classify/batch",
            BatchClassification.model_validate_json,
            requests.form(images)
            | requests.query(top_k=top_k, attention=attention, labels=labels, model=model),
        )

    @_Method
    def embed(
        self,
        image: ImageSource,
        *,
        pool: Pooling | None = None,
        normalize: bool | None = None,
        model: str | None = None,
    ) -> Request[Array]:
        """Return the embedding of one image, float32 [D]."""
        return Request(
            "POST",
            "/embed",
            requests.array,
            requests.body(image)
            | requests.query(pool=pool, normalize=normalize, model=model, format="npy"),
        )

    @_Method
    def embed_batch(
        self,
        images: Sequence[ImageSource],
        *,
        pool: Pooling | None = None,
        normalize: bool | None = None,
        model: str | None = None,
    ) -> Request[Array]:
        """Return the embeddings of several images, float32 [N, D]; one that cannot be read fails
        all of them.
        """
        return Request(
            "POST",
            "/embed/batch",
            requests.array,
            requests.form(images)
            | requests.query(pool=pool, normalize=normalize, model=model, format="npy"),
        )

    @_Method
    def embed_texts(
        self, texts: Sequence[str], *, normalize: bool | None = None, model: str | None = None
    ) -> Request[Array]:
        """Return the features of texts, float32 [N, D], of a model with a text tower."""
        return Request(
            "POST",
            "/embed",
            requests.array,
            requests.query(text=texts, normalize=normalize, model=model, format="npy"),
        )

    @_Method
    def attention(
        self, image: ImageSource | Classification, **options: Unpack[MapOptions]
    ) -> Request[list[AttentionDocument]]:
        """Return the map of each class that is asked for, of the best one if none is, with its
        facts.

        Of a `Classification`, the maps are those of its picture, which is not sent again.
        """
        return requests.map_of(image, requests.documents, **options, format="json")

    @_Method
    def attention_array(
        self, image: ImageSource | Classification, **options: Unpack[MapOptions]
    ) -> Request[Array]:
        """Return a map as float32 [rows, columns], or [maps, rows, columns] for several classes."""
        return requests.map_of(image, requests.array, **options, format="npy")

    @_Method
    def heat_map(
        self, image: ImageSource | Classification, **options: Unpack[DrawingOptions]
    ) -> Request[bytes]:
        """Return a map drawn as PNG."""
        return replace(requests.map_of(image, bytes, **options), drawn=True)

    @_Method
    def model(self, name: str | None = None) -> Request[ModelDescription]:
        """Describe a model that is served, by default the default one."""
        return Request(
            "GET", "/model", ModelDescription.model_validate_json, requests.query(model=name)
        )

    @_Method
    def models(self) -> Request[list[ListedModel]]:
        """List all models that the service has, by name."""
        return Request("GET", "/models", requests.MODELS.validate_json)

    @_Method
    def labels(self, model: str | None = None) -> Request[list[str]]:
        """List the classes of a model, in index order."""
        asked = requests.query(model=model)
        return Request(
            "GET", "/labels", lambda content: Labels.model_validate_json(content).labels, asked
        )

    @_Method
    def teach(
        self,
        head: str,
        label: str,
        image: ImageSource | Classification,
        *,
        backbone: str | None = None,
    ) -> Request[AddedExamples]:
        """Add an image to what a head learns from; return its number, and how many examples each
        label has.

        Of a `Classification` it is the picture that the service kept. The first example begins the
        head, on the features of the model `backbone`.
        """
        path, parse = f"/heads/{quote(head, safe='')}/examples", AddedExamples.model_validate_json
        if isinstance(image, Classification):
            return Request(
                "POST", path, parse, requests.query(label=label, id=image.id, backbone=backbone)
            )
        return Request(
            "POST",
            path,
            parse,
            requests.body(image) | requests.query(label=label, backbone=backbone),
        )

    @_Method
    def head(self, name: str) -> Request[HeadDescription]:
        """Describe a taught head: its examples, how often it is right, and which labels look wrong."""
        return Request("GET", f"/heads/{quote(name, safe='')}", HeadDescription.model_validate_json)

    def _read(self, request: Request[Answer], response: httpx.Response) -> Answer:
        self._answered = True
        try:
            answer = request.read(response)
        except ForeignAnswer as error:
            message = f"{error}{self._through()}{self._without_path()}"
            raise ForeignAnswer(message, error.status, error.retry_after) from None
        except ProblemError as error:
            if error.code in _OF_PATHS:
                error.args = (f"{error}{self._without_path()}",)
            raise
        self._succeeded = True
        return answer

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        return Unreachable(error, self._http.base_url, self._through())

    def _through(self) -> str:
        """Return what a message adds about the proxy of the environment; nothing if there is none."""
        return "" if self._proxy is None else f", through {self._proxy}; {self._proxy.remedy}"

    def _without_path(self) -> str:
        """Return what a message adds if the url has a path, below which no request has succeeded."""
        url = self._http.base_url
        if self._succeeded or url.path == "/":
            return ""
        address = str(url.copy_with(path="/", query=None, userinfo=b"")).rstrip("/")
        return (
            f": url is the address of the service, without the path of a request, such as {address}"
        )

    def _pause_after(
        self, error: ClientError | httpx.TransportError, tries: int, ends_at: float
    ) -> float:
        """Return the seconds to wait after so many tries, never less than `Retry-After` names.

        Raises:
            ClientError: there is no next try; `Unreachable` for an error of httpx.
        """
        retries = self._retries
        failure = error if isinstance(error, ClientError) else self._unreachable(error)
        if not failure.temporary or tries >= retries.tries:
            raise failure
        # A connection that is refused where nobody ever answered is rather a wrong address than a
        # server that starts.
        if isinstance(failure, Unreachable) and failure.never_connected and not self._answered:
            raise failure
        pause: float = min(retries.first_pause * 2 ** (tries - 1), _LONGEST_PAUSE)
        if failure.retry_after is None:
            pause *= (1 + retries.jitter()) / 2
        else:
            pause = failure.retry_after + pause * retries.jitter()
        if retries.clock() + pause > ends_at:
            raise failure
        return pause

    def _keep_side(self, described: ModelDescription) -> None:
        self._side = max(described.preprocessing["resize_size"])
        self._side_until = self._retries.clock() + _SIDE_SECONDS


class Client(_Service):
    """A blocking client, for as many threads as like; use it as a context manager so that its
    connections are closed.

    Args:
        url: of the service.
        api_key: sent as `Authorization: Bearer`.
        timeout: seconds of silence after which a request is given up.
        retries: how often and how long a refusal for the moment, or a broken connection, is tried
        again.
        shrink: send large JPEG and PNG pictures as small as the model can do with (see
        docs/api.md); it needs Pillow.
        sleep: waits between two tries.

    HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY apply, unless a transport is given.

    Every method raises a `ClientError` when there is no answer: of the type `ProblemError` when the
    service refuses, `Unreachable` when it cannot be reached. One that reads a file raises `OSError`
    when it cannot.
    """

    _http: httpx.Client

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 30,
        retries: Retries = Retries(),
        shrink: bool = False,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if transport is None:
            self._proxy = proxy_of(httpx.URL(url))
            transport = transport_through(self._proxy, httpx.HTTPTransport)
        self._http = httpx.Client(
            base_url=url, transport=transport, **_connection(api_key, timeout)
        )
        self._retries, self._shrink, self._sleep = retries, shrink, sleep

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
        """Ask about any number of images, several at a time; yield each in order with its answer or
        its error.

        Images are taken from `images` as there is room, and never more than twice `concurrency` of
        them are under way or wait to be given out, so memory is bounded. An iteration that is left
        early waits for the requests under way.

        Args:
            ask: a method of this client, or a function that calls some; it runs in several threads.
            concurrency: how many requests are under way at once, at least 1.
        """
        remaining, jobs = iter(images), deque[tuple[Source, Future[Answer]]]()
        pool = ThreadPoolExecutor(concurrency)
        try:
            while True:
                taken = itertools.islice(remaining, 2 * concurrency - len(jobs))
                jobs.extend((image, pool.submit(ask, image)) for image in taken)
                if not jobs:
                    return
                image, job = jobs.popleft()
                yield image, _answer_or_error(job.result)
        finally:
            pool.shutdown(cancel_futures=True)

    @staticmethod
    def _sender(build: Callable[..., Request[Any]]) -> Callable[..., Any]:
        def send(self: Client, *arguments: Any, **options: Any) -> Any:
            request = build(self, *arguments, **options)
            if self._shrink and request.can_shrink:
                if self._retries.clock() > self._side_until:
                    self._keep_side(self.model())
                request = request.shrunk(self._side)
            numbers, ends_at = itertools.count(1), self._retries.clock() + self._retries.seconds
            while True:
                try:
                    return self._read(
                        request, self._http.request(request.method, request.path, **request.options)
                    )
                except (ClientError, httpx.TransportError) as error:
                    pause = self._pause_after(error, next(numbers), ends_at)
                self._sleep(pause)

        return send


class AsyncClient(_Service):
    """An asynchronous client with the arguments, the methods and the errors of `Client`."""

    _http: httpx.AsyncClient

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout = 30,
        retries: Retries = Retries(),
        shrink: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if transport is None:
            self._proxy = proxy_of(httpx.URL(url))
            transport = transport_through(self._proxy, httpx.AsyncHTTPTransport)
        self._http = httpx.AsyncClient(
            base_url=url, transport=transport, **_connection(api_key, timeout)
        )
        self._retries, self._shrink, self._sleep = retries, shrink, sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def stream(
        self,
        images: Iterable[Source],
        ask: Callable[[Source], Coroutine[Any, Any, Answer]],
        *,
        concurrency: int = 8,
    ) -> AsyncIterator[tuple[Source, Answer | ClientError | OSError]]:
        """Do as `Client.stream`, with `ask` a coroutine function; closing the iterator ends the
        requests under way.
        """
        room = asyncio.Semaphore(concurrency)

        async def bounded(image: Source) -> Answer:
            async with room:
                return await ask(image)

        remaining, tasks = iter(images), deque[tuple[Source, asyncio.Task[Answer]]]()
        try:
            while True:
                taken = itertools.islice(remaining, 2 * concurrency - len(tasks))
                tasks.extend((image, asyncio.create_task(bounded(image))) for image in taken)
                if not tasks:
                    return
                image, task = tasks[0]
                await asyncio.wait([task])
                tasks.popleft()
                yield image, _answer_or_error(task.result)
        finally:
            for _, task in tasks:
                task.cancel()
            await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)

    @staticmethod
    def _sender(build: Callable[..., Request[Any]]) -> Callable[..., Any]:
        async def send(self: AsyncClient, *arguments: Any, **options: Any) -> Any:
            # In a thread, as files are read and pictures are encoded.
            request = await asyncio.to_thread(build, self, *arguments, **options)
            if self._shrink and request.can_shrink:
                if self._retries.clock() > self._side_until:
                    self._keep_side(await self.model())
                request = await asyncio.to_thread(request.shrunk, self._side)
            numbers, ends_at = itertools.count(1), self._retries.clock() + self._retries.seconds
            while True:
                try:
                    response = await self._http.request(
                        request.method, request.path, **request.options
                    )
                    return self._read(request, response)
                except (ClientError, httpx.TransportError) as error:
                    pause = self._pause_after(error, next(numbers), ends_at)
                await self._sleep(pause)

        return send


def _connection(api_key: str | None, timeout: float | httpx.Timeout) -> dict[str, Any]:
    """Return httpx's arguments; a request may wait for one of the client's connections as long as
    it takes.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if not isinstance(timeout, httpx.Timeout):
        timeout = httpx.Timeout(timeout, pool=None)
    return {"headers": headers, "timeout": timeout}


def _answer_or_error(result: Callable[[], Answer]) -> Answer | ClientError | OSError:
    """Return what `result` returns, or the error that it raises if that concerns one image alone."""
    try:
        return result()
    except (ClientError, OSError) as error:
        return error
