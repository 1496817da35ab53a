"""A client of the service, blocking and asynchronous, on httpx.

with Client("http://127.0.0.1:8000") as client:
    print(client.classify("photo.jpg").predictions[0].label)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from service.schemas import FIELD, BatchClassification, Classification, Labels, ModelDescription, ProblemDocument

ImageSource = str | Path | bytes
"""The path of an image file, or the bytes of one."""

_Answer = TypeVar("_Answer")
_Document = TypeVar("_Document", bound=BaseModel)


class ClientError(Exception):
    """The service could not be asked, or the answer is not one of vitserve."""


class ProblemError(ClientError):
    """The service refused the request with `problem`; `retry_after` are the seconds to wait, if it named any."""

    def __init__(self, problem: ProblemDocument, retry_after: int | None) -> None:
        super().__init__(f"{problem.status} {problem.code}: {problem.detail}")
        self.problem = problem
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class _Request(Generic[_Answer]):
    """One request as data, which either client sends; `read` turns a successful response into the answer."""

    method: str
    path: str
    read: Callable[[httpx.Response], _Answer]
    options: dict[str, Any] = field(default_factory=dict)


def _classify(image: ImageSource, top_k: int | None, attention: bool) -> _Request[Classification]:
    options = _raw(image) | _query(top_k=top_k, attention=attention)
    return _Request("POST", "/classify", partial(_parsed, Classification), options)


def _classify_batch(images: list[ImageSource], top_k: int | None, attention: bool) -> _Request[BatchClassification]:
    files = [(FIELD, (str(index), _content(image))) for index, image in enumerate(images)]
    options = {"files": files} | _query(top_k=top_k, attention=attention)
    return _Request("POST", "/classify/batch", partial(_parsed, BatchClassification), options)


def _heat_map(image: ImageSource, parameters: dict[str, Any]) -> _Request[bytes]:
    return _Request("POST", "/attention", lambda response: response.content, _raw(image) | _query(**parameters))


def _content(image: ImageSource) -> bytes:
    return image if isinstance(image, bytes) else Path(image).read_bytes()


def _raw(image: ImageSource) -> dict[str, Any]:
    return {"content": _content(image), "headers": {"Content-Type": "application/octet-stream"}}


def _query(**parameters: object) -> dict[str, Any]:
    named = {name.rstrip("_"): value for name, value in parameters.items() if value is not None}
    return {"params": {name: str(value).lower() if isinstance(value, bool) else value for name, value in named.items()}}


def _connection(api_key: str | None, timeout: float) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"headers": headers, "timeout": timeout}


def _checked(response: httpx.Response) -> httpx.Response:
    """Return the response if it is a success; raises `ProblemError`, or `ClientError` if vitserve did not answer."""
    if response.is_success:
        return response
    try:
        problem = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        raise ClientError(f"{response.status_code} from {response.url}, which is no answer of vitserve") from None
    retry_after = response.headers.get("retry-after", "")
    raise ProblemError(problem, int(retry_after) if retry_after.isdecimal() else None)


def _parsed(kind: type[_Document], response: httpx.Response) -> _Document:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError:
        raise ClientError(f"{response.url} did not answer as vitserve does") from None


_MODEL = _Request("GET", "/model", partial(_parsed, ModelDescription))
_LABELS = _Request("GET", "/labels", lambda response: _parsed(Labels, response).labels)


class Client:
    """A blocking client; use it as a context manager so that its connections are closed.

    Args:
        url: of the service.
        api_key: sent as `Authorization: Bearer`.
        timeout: seconds of silence after which a request is given up.

    Every method raises `ProblemError` when the service refuses, and `httpx.TransportError` when it
    cannot be reached.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout: float = 30, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._http = httpx.Client(base_url=url, transport=transport, **_connection(api_key, timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def classify(self, image: ImageSource, *, top_k: int | None = None, attention: bool = False) -> Classification:
        """Classify one image."""
        return self._send(_classify(image, top_k, attention))

    def classify_batch(
        self, images: list[ImageSource], *, top_k: int | None = None, attention: bool = False
    ) -> BatchClassification:
        """Classify several images; the results are in their order, each an answer or an error of its own."""
        return self._send(_classify_batch(images, top_k, attention))

    def heat_map(self, image: ImageSource, **options: Any) -> bytes:
        """Draw a heat map as PNG; options as those of POST /attention (`layer`, `head`, `colormap`, ...)."""
        return self._send(_heat_map(image, options))

    def model(self) -> ModelDescription:
        """Describe the model that is served."""
        return self._send(_MODEL)

    def labels(self) -> list[str]:
        """List the classes, in index order."""
        return self._send(_LABELS)

    def _send(self, request: _Request[_Answer]) -> _Answer:
        return request.read(_checked(self._http.request(request.method, request.path, **request.options)))


class AsyncClient:
    """An asynchronous client with the arguments and the methods of `Client`."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 30,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, transport=transport, **_connection(api_key, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def classify(
        self, image: ImageSource, *, top_k: int | None = None, attention: bool = False
    ) -> Classification:
        """Classify one image."""
        return await self._send(_classify(image, top_k, attention))

    async def classify_batch(
        self, images: list[ImageSource], *, top_k: int | None = None, attention: bool = False
    ) -> BatchClassification:
        """Classify several images; the results are in their order, each an answer or an error of its own."""
        return await self._send(_classify_batch(images, top_k, attention))

    async def heat_map(self, image: ImageSource, **options: Any) -> bytes:
        """Draw a heat map as PNG; options as those of POST /attention (`layer`, `head`, `colormap`, ...)."""
        return await self._send(_heat_map(image, options))

    async def model(self) -> ModelDescription:
        """Describe the model that is served."""
        return await self._send(_MODEL)

    async def labels(self) -> list[str]:
        """List the classes, in index order."""
        return await self._send(_LABELS)

    async def _send(self, request: _Request[_Answer]) -> _Answer:
        return request.read(_checked(await self._http.request(request.method, request.path, **request.options)))
