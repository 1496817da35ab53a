"""The requests of the service as data for both clients, and how to read their answers."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

import httpx
from pydantic import TypeAdapter

from vitserve.documents import (
    FIELD,
    MAPS,
    AttentionDocument,
    BatchClassification,
    Classification,
    Classifications,
    ListedModel,
    RegionDocument,
)
from vitserve.errors import ClientError, ForeignAnswer, error_of
from vitserve.pictures import PNG_SIGNATURE, ImageSource, file_bytes, require_several
from vitserve.shrinking import Pixel, shrink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.float32]"

WithAttention = bool | Literal["relevance"]
"""The parameter `attention` of /classify."""

Answer = TypeVar("Answer")

_LONGEST_TIMEOUT = 1e9
"""Seconds; sockets do not take much longer timeouts."""

_MIN_SHRUNK_BYTES = 16_384
"""Smaller files are not worth shrinking."""

MODELS = TypeAdapter(list[ListedModel])


class MapOptions(TypedDict, total=False):
    """Which map /attention computes; the service has a default for each option.

    `class_` is an index or a label, or several; with `labels` it refers to those. The default of
    `model` for a `Classification` is the model that gave it.
    """

    model: str
    method: str
    class_: int | str | Sequence[int | str]
    labels: Sequence[str]
    layer: int
    head: int | str


class DrawingOptions(MapOptions, total=False):
    """Which map /attention computes, and how it is drawn as PNG."""

    overlay: bool
    view: Literal["input", "photo"]
    alpha: float
    colormap: str
    size: int
    smooth: bool
    caption: bool


@dataclass(frozen=True, slots=True)
class Request(Generic[Answer]):
    """One request.

    Attributes:
        method: HTTP method.
        path: path of the route.
        parse: function that reads the answer in the body of a successful response; it raises
            ValueError or EOFError for another body.
        options: arguments of httpx.
        pixels: size of a pixel of each sent or kept picture; empty if these are the originals.
    """

    method: str
    path: str
    parse: Callable[[bytes], Answer]
    options: dict[str, Any] = field(default_factory=dict)
    pixels: Sequence[Pixel] = ()

    def read(self, response: httpx.Response) -> Answer:
        """Return the answer; raises `ClientError` for a refusal or another server's response."""
        if not response.is_success:
            raise error_of(response)
        try:
            answer = self.parse(response.content)
        except (ValueError, EOFError):
            message = f"{response.url} did not answer as vitserve does"
            raise ForeignAnswer(message, response.status_code) from None
        _refer_to_originals(answer, self.pixels)
        return answer

    @property
    def can_shrink(self) -> bool:
        """Whether to shrink: a large file goes to the default model, whose input size is known."""
        is_drawn_on = self.parse is png
        names_model = "model" in self.options.get("params", ())
        if is_drawn_on or names_model:
            return False
        return max(map(len, self._files), default=0) >= _MIN_SHRUNK_BYTES

    def shrunk(self, side: float) -> Request[Answer]:
        """Return the request with pictures shrunk for a model of this input size."""
        small = [shrink(data, side) for data in self._files]
        if "files" in self.options:
            pictures = _files_of(picture.data for picture in small)
        else:
            pictures = {"content": small[0].data}
        pixels = [picture.pixel for picture in small]
        return replace(self, options=self.options | pictures, pixels=pixels)

    @property
    def _files(self) -> list[bytes]:
        if "content" in self.options:
            return [self.options["content"]]
        return [data for _, (_, data) in self.options.get("files", ())]


def service_url(url: str | httpx.URL) -> httpx.URL:
    """Return the address of a service; raises `ClientError` for another kind of address."""
    if not isinstance(url, str | httpx.URL):
        raise TypeError(f"url {url!r}: expected an address such as http://localhost:8000")
    text = str(url).strip()
    if re.match(r"/(?!/)|(\w+\+)?unix:", text):
        raise ClientError(
            "a Unix socket needs the url http://localhost and transport=HTTPTransport(uds=PATH) "
            "of httpx"
        )
    if not re.match(r"https?://[^/]", text, re.IGNORECASE):
        meant = re.sub(r"^(\w*://|https?:)?/*", "", text) or "localhost:8000"
        raise ClientError(f"expected an address such as http://{meant}")
    if "?" in text or "#" in text:
        raise ClientError("expected an address without ? and #: each request has its own query")
    try:
        address = httpx.URL(text)
    except httpx.InvalidURL as error:
        form = "http://HOST:PORT, with an IPv6 address in brackets"
        raise ClientError(f"{error}: expected {form}") from None
    if address.port is not None and not 0 < address.port < 65_536:
        raise ClientError(f"expected a port from 1 to 65535, not {address.port}")
    return address


def client_options(
    address: httpx.URL, api_key: str | None, timeout: float | httpx.Timeout
) -> dict[str, Any]:
    """Return httpx's options, without a timeout for the wait for a free connection."""
    headers = {}
    if api_key:
        headers["Authorization"] = _authorization(api_key)
        if address.userinfo:
            raise ClientError("a user in the url and an api_key exclude each other: give only one")
    if not isinstance(timeout, httpx.Timeout):
        is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout < _LONGEST_TIMEOUT:
            raise ValueError(
                f"timeout {timeout!r}: expected seconds above 0, or httpx.Timeout(None) for none"
            )
        timeout = httpx.Timeout(float(timeout), pool=None)
    return {"base_url": address, "headers": headers, "timeout": timeout}


def _authorization(api_key: str) -> bytes:
    """Return the header with a key; raises `ClientError` for another text."""
    if not isinstance(api_key, str):
        raise TypeError(f"the api_key is of type {type(api_key).__name__}: expected str")
    key = api_key.strip()
    wrong = re.search("[^!-~]|[\"',;]", key)
    if wrong is not None:
        raise ClientError(f"the api_key contains {wrong[0]!r}: give the key alone")
    if not key:
        raise ClientError("the api_key is empty: leave it out for a service without keys")
    return f"Bearer {key}".encode()


def body(image: ImageSource) -> dict[str, Any]:
    """Return httpx's arguments for a request with one picture."""
    return {"content": file_bytes(image), "headers": {"Content-Type": "application/octet-stream"}}


def form(images: Sequence[ImageSource]) -> dict[str, Any]:
    """Return httpx's arguments for a request with several pictures."""
    require_several(images)
    arguments = _files_of(map(file_bytes, images))
    if not arguments["files"]:
        raise ValueError("the list of pictures is empty")
    return arguments


def _files_of(contents: Iterable[bytes]) -> dict[str, Any]:
    return {"files": [(FIELD, (str(index), data)) for index, data in enumerate(contents)]}


def head_path(name: str) -> str:
    """Return the path of a taught head; raises `ValueError` if the name would be another path."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name:
        raise ValueError(f"head {name!r}: expected the name of a head, without a slash")
    return f"/heads/{quote(name, safe='')}"


def query(**parameters: object) -> dict[str, Any]:
    """Return httpx's arguments for a request with parameters, without parameters that are None."""
    values = {name.rstrip("_"): value for name, value in parameters.items() if value is not None}
    return {"params": {name: _text(name, value) for name, value in values.items()}}


def map_of(
    image: ImageSource | Classification, parse: Callable[[bytes], Answer], **options: object
) -> Request[Answer]:
    """Return the request for a map of an image, sent or kept by the service."""
    if not isinstance(image, Classification):
        return Request("POST", "/attention", parse, body(image) | query(**options))
    parameters = query(**{"id": kept_id(image), "model": image.model, **options})
    return Request("GET", "/attention", parse, parameters, pixels=[image._pixel])


def kept_id(answer: Classification) -> str:
    """Return the id of the kept picture; raises `ValueError` if the service did not keep it."""
    if answer.id is None:
        raise ValueError(
            "the service did not keep the picture of this classification (VIT_RECENT_TTL is 0): "
            "send the picture"
        )
    return answer.id


def _refer_to_originals(answer: object, pixels: Sequence[Pixel]) -> None:
    """Convert the regions in an answer to pixels of the original pictures."""
    answers: Sequence[object] = [answer]
    if isinstance(answer, BatchClassification):
        answers = answer.results
    elif isinstance(answer, Classifications):
        answers = list(answer.models.values())
        pixels = [*pixels] * len(answers)
    for item, pixel in zip(answers, pixels, strict=False):
        if isinstance(item, Classification):
            item._pixel = pixel
        maps = item if isinstance(item, list) else [getattr(item, "attention", None)]
        for attention_map in maps:
            if attention_map is not None:
                _scale(attention_map.region, pixel)


def _scale(region: RegionDocument, pixel: Pixel) -> None:
    width, height = pixel
    region.x *= width
    region.width *= width
    region.y *= height
    region.height *= height


def _text(name: str, value: object) -> str | list[str]:
    """Return a parameter's value in the service's form; labels and texts may contain commas."""
    if isinstance(value, bool):
        if name == "top_k":
            raise TypeError(f"top_k {value}: expected a whole number")
        return str(value).lower()
    if isinstance(value, str) or not isinstance(value, Iterable):
        return str(value)
    items = list(value)
    if not items:
        raise ValueError(f"{name} is empty: name some, or leave it out")
    if name not in ("labels", "text"):
        return ",".join(map(str, items))
    if not all(isinstance(item, str) for item in items):
        raise TypeError(f"{name}: expected a list of str")
    return items if name == "text" else json.dumps(items, ensure_ascii=False)


def documents(content: bytes) -> list[AttentionDocument]:
    """Parse one map with its facts, or a list of them."""
    parsed = MAPS.validate_json(content)
    return parsed if isinstance(parsed, list) else [parsed]


def png(content: bytes) -> bytes:
    """Return a PNG unchanged; raises `ValueError` for other bytes."""
    if not content.startswith(PNG_SIGNATURE):
        raise ValueError("not a PNG")
    return content


def array(content: bytes) -> Array:
    """Parse a file of numpy's format."""
    import numpy as np  # noqa: PLC0415  slow to import, and few programs need it

    parsed: Array = np.load(io.BytesIO(content), allow_pickle=False)
    return parsed
