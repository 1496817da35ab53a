"""A client of the service, blocking and asynchronous, on httpx.

with Client("http://127.0.0.1:8000") as client:
    print(client.classify("photo.jpg").predictions[0].label)
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from service.schemas import FIELD, BatchClassification, Classification, Labels, ModelDescription, ProblemDocument

Picture = str | Path | bytes
"""A file's path, or the bytes of a picture."""

_Answer = TypeVar("_Answer", bound=BaseModel)


class ClientError(Exception):
    """The service could not be asked, or answered what is no answer of vitserve."""


class ProblemError(ClientError):
    """The service refused.

    Attributes:
        problem: what it said, with its status and code.
        retry_after: seconds to wait before another try, if it named any.
    """

    def __init__(self, problem: ProblemDocument, retry_after: int | None) -> None:
        super().__init__(f"{problem.status} {problem.code}: {problem.detail}")
        self.problem = problem
        self.retry_after = retry_after


def _options(api_key: str | None, timeout: float) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"headers": headers, "timeout": timeout}


def _content(picture: Picture) -> bytes:
    return picture if isinstance(picture, bytes) else Path(picture).read_bytes()


def _raw(picture: Picture) -> dict[str, Any]:
    return {"content": _content(picture), "headers": {"Content-Type": "application/octet-stream"}}


def _form(pictures: list[Picture]) -> dict[str, Any]:
    return {"files": [(FIELD, (str(index), _content(picture))) for index, picture in enumerate(pictures)]}


def _query(**parameters: object) -> dict[str, Any]:
    named = {name.rstrip("_"): value for name, value in parameters.items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in named.items()}


def _checked(response: httpx.Response) -> httpx.Response:
    """The response, if it is a success.

    Raises:
        ProblemError: the service refused.
        ClientError: somebody else answered.
    """
    if response.is_success:
        return response
    try:
        problem = ProblemDocument.model_validate_json(response.content)
    except ValidationError:
        raise ClientError(f"{response.status_code} from {response.url}, which is no answer of vitserve") from None
    retry_after = response.headers.get("retry-after", "")
    raise ProblemError(problem, int(retry_after) if retry_after.isdecimal() else None)


def _parsed(response: httpx.Response, kind: type[_Answer]) -> _Answer:
    try:
        return TypeAdapter(kind).validate_json(_checked(response).content)
    except ValidationError:
        raise ClientError(f"{response.url} did not answer as vitserve does") from None


class Client:
    """Blocking; use it as a context manager so that its connections are closed.

    Args:
        url: of the service.
        api_key: sent as `Authorization: Bearer`.
        timeout: seconds of silence after which a request is given up.
        transport: of httpx; for tests.

    Every method raises `ProblemError` when the service refuses, and `httpx.TransportError` when it
    cannot be reached.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 30,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._http = httpx.Client(base_url=url, transport=transport, **_options(api_key, timeout))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def classify(self, picture: Picture, *, top_k: int | None = None, attention: bool = False) -> Classification:
        """One picture's classes."""
        query = _query(top_k=top_k, attention=attention)
        return _parsed(self._http.post("/classify", params=query, **_raw(picture)), Classification)

    def classify_batch(
        self, pictures: list[Picture], *, top_k: int | None = None, attention: bool = False
    ) -> BatchClassification:
        """Several pictures' classes, in order; each its own answer or error."""
        query = _query(top_k=top_k, attention=attention)
        return _parsed(self._http.post("/classify/batch", params=query, **_form(pictures)), BatchClassification)

    def heat_map(self, picture: Picture, **options: Any) -> bytes:
        """A heat map as PNG; options as those of POST /attention (`layer`, `head`, `colormap`, ...)."""
        return _checked(self._http.post("/attention", params=_query(**options), **_raw(picture))).content

    def model(self) -> ModelDescription:
        """What is served."""
        return _parsed(self._http.get("/model"), ModelDescription)

    def labels(self) -> list[str]:
        """The classes, in index order."""
        return _parsed(self._http.get("/labels"), Labels).labels


class AsyncClient:
    """The same as `Client`, to be awaited."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout: float = 30,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._http = httpx.AsyncClient(base_url=url, transport=transport, **_options(api_key, timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def classify(self, picture: Picture, *, top_k: int | None = None, attention: bool = False) -> Classification:
        """One picture's classes."""
        query = _query(top_k=top_k, attention=attention)
        return _parsed(await self._http.post("/classify", params=query, **_raw(picture)), Classification)

    async def classify_batch(
        self, pictures: list[Picture], *, top_k: int | None = None, attention: bool = False
    ) -> BatchClassification:
        """Several pictures' classes, in order; each its own answer or error."""
        query = _query(top_k=top_k, attention=attention)
        return _parsed(await self._http.post("/classify/batch", params=query, **_form(pictures)), BatchClassification)

    async def heat_map(self, picture: Picture, **options: Any) -> bytes:
        """A heat map as PNG; options as those of POST /attention (`layer`, `head`, `colormap`, ...)."""
        return _checked(await self._http.post("/attention", params=_query(**options), **_raw(picture))).content

    async def model(self) -> ModelDescription:
        """What is served."""
        return _parsed(await self._http.get("/model"), ModelDescription)

    async def labels(self) -> list[str]:
        """The classes, in index order."""
        return _parsed(await self._http.get("/labels"), Labels).labels
