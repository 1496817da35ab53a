"""Every request of the service as data, which either client sends, and how its answer is read."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypedDict, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from service.client.errors import ForeignAnswer, error_of
from service.schemas import (
    FIELD,
    AttentionDocument,
    BatchClassification,
    Classification,
    Labels,
    ModelDescription,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.float32]"

ImageSource = str | Path | bytes
"""The path of an image file, or the bytes of one."""

WithAttention = bool | Literal["relevance"]
"""The parameter `attention` of /classify."""

_Answer = TypeVar("_Answer")
_Document = TypeVar("_Document", bound=BaseModel)

_DOCUMENTS: TypeAdapter[AttentionDocument | list[AttentionDocument]] = TypeAdapter(
    AttentionDocument | list[AttentionDocument]
)


class MapOptions(TypedDict, total=False):
    """Which map /attention computes; what is left out is the service's default.

    `class_` is an index or a label, or several of them.
    """

    method: str
    class_: int | str | Sequence[int | str]
    layer: int
    head: int | str
    fusion: Literal["mean", "max", "min"]
    discard: float


class DrawingOptions(MapOptions, total=False):
    """Which map /attention computes, and how it is drawn as PNG."""

    overlay: bool
    view: Literal["input", "photo"]
    alpha: float
    colormap: str
    size: int
    smooth: bool
    colorbar: bool


@dataclass(frozen=True, slots=True)
class Request(Generic[_Answer]):
    """One request; `parse` turns a successful response into the answer."""

    method: str
    path: str
    parse: Callable[[httpx.Response], _Answer]
    options: dict[str, Any] = field(default_factory=dict)

    def read(self, response: httpx.Response) -> _Answer:
        """Return the answer; raises `ClientError` if the response is a refusal or not one of vitserve."""
        if not response.is_success:
            raise error_of(response)
        return self.parse(response)


def classify(image: ImageSource, top_k: int | None, attention: WithAttention) -> Request[Classification]:
    """Return the request for one image's classes."""
    options = _body(image) | _query(top_k=top_k, attention=attention)
    return Request("POST", "/classify", partial(_parsed, Classification), options)


def classify_batch(
    images: Sequence[ImageSource], top_k: int | None, attention: WithAttention
) -> Request[BatchClassification]:
    """Return the request for the classes of several images."""
    files = [(FIELD, (str(index), _content(image))) for index, image in enumerate(images)]
    options = {"files": files} | _query(top_k=top_k, attention=attention)
    return Request("POST", "/classify/batch", partial(_parsed, BatchClassification), options)


def attention(image: ImageSource | Classification, options: MapOptions) -> Request[list[AttentionDocument]]:
    """Return the request for a map with its facts, or for several of different classes."""
    return _map(image, {**options, "format": "json"}, _documents)


def attention_array(image: ImageSource | Classification, options: MapOptions) -> Request[Array]:
    """Return the request for a map as an array."""
    return _map(image, {**options, "format": "npy"}, _array)


def heat_map(image: ImageSource | Classification, options: DrawingOptions) -> Request[bytes]:
    """Return the request for a map as PNG."""
    return _map(image, {**options}, lambda response: response.content)


def model() -> Request[ModelDescription]:
    """Return the request for the model's description."""
    return Request("GET", "/model", partial(_parsed, ModelDescription))


def labels() -> Request[list[str]]:
    """Return the request for the classes."""
    return Request("GET", "/labels", lambda response: _parsed(Labels, response).labels)


def connection(api_key: str | None, timeout: float | httpx.Timeout) -> dict[str, Any]:
    """Return httpx's arguments; a request may wait for one of the client's connections as long as it takes."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if not isinstance(timeout, httpx.Timeout):
        timeout = httpx.Timeout(timeout, pool=None)
    return {"headers": headers, "timeout": timeout}


def _map(
    image: ImageSource | Classification, query: dict[str, Any], parse: Callable[[httpx.Response], _Answer]
) -> Request[_Answer]:
    """Return the request for a map of an image that is sent, or that the service kept when it classified it."""
    if not isinstance(image, Classification):
        return Request("POST", "/attention", parse, _body(image) | _query(**query))
    if image.id is None:
        raise ValueError("the service kept no picture of this classification (VIT_RECENT_TTL is 0): send the picture")
    return Request("GET", "/attention", parse, _query(id=image.id, **query))


def _content(image: ImageSource) -> bytes:
    return image if isinstance(image, bytes) else Path(image).read_bytes()


def _body(image: ImageSource) -> dict[str, Any]:
    return {"content": _content(image), "headers": {"Content-Type": "application/octet-stream"}}


def _query(**parameters: object) -> dict[str, Any]:
    return {"params": {name.rstrip("_"): _text(value) for name, value in parameters.items() if value is not None}}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(str, value))
    return str(value)


def _parsed(kind: type[_Document], response: httpx.Response) -> _Document:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError:
        raise _foreign(response) from None


def _documents(response: httpx.Response) -> list[AttentionDocument]:
    try:
        found = _DOCUMENTS.validate_json(response.content)
    except ValidationError:
        raise _foreign(response) from None
    return found if isinstance(found, list) else [found]


def _array(response: httpx.Response) -> Array:
    import numpy as np  # noqa: PLC0415  programs that ask for no array start quicker

    try:
        array: Array = np.load(io.BytesIO(response.content), allow_pickle=False)
    except (ValueError, EOFError):
        raise _foreign(response) from None
    return array


def _foreign(response: httpx.Response) -> ForeignAnswer:
    return ForeignAnswer(f"{response.url} did not answer as vitserve does", response.status_code)
