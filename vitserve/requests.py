"""The requests of the service as data for both clients, and how to read their answers."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypedDict, TypeVar, cast

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
from vitserve.shrinking import Pixel, shrink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

ImageSource: TypeAlias = "str | Path | bytes | IO[bytes] | Image.Image | NDArray[np.uint8]"
"""A path, the bytes of a file, a file open for binary reading, a PIL image, or a uint8 array.

An array [rows, columns] is grey, [rows, columns, 3] is RGB, and [rows, columns, 4] is RGBA.
"""

_ORIENTATION_TAG = 0x0112
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")

_ARRAY_MODES = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA"}
"""Modes by an array's axes after rows and columns."""

_EXPECTED = (
    "expected a path, bytes, a file open for binary reading, a PIL image, "
    "or a uint8 array [rows, columns] or [rows, columns, 1, 3 or 4]"
)

Array: TypeAlias = "NDArray[np.float32]"

WithAttention = bool | Literal["relevance"]
"""The parameter `attention` of /classify."""

Answer = TypeVar("Answer")

_MAX_PATH = 4096
"""Most characters of a path on Linux; a longer text is a picture's content."""

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
        drawn: whether the answer is a drawing on the picture, which is then not shrunk.
        pixels: pixel of each sent or kept picture; empty if they are the originals.
    """

    method: str
    path: str
    parse: Callable[[bytes], Answer]
    options: dict[str, Any] = field(default_factory=dict)
    drawn: bool = False
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
        names_model = "model" in self.options.get("params", ())
        if self.drawn or names_model:
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
    scheme, separator, rest = str(url).strip().partition("://")
    if scheme.startswith(("/", "unix:", "http+unix")) or scheme.endswith("unix"):
        raise ClientError(
            "a Unix socket needs the url http://localhost and transport=HTTPTransport(uds=PATH) "
            "of httpx"
        )
    if not separator or scheme.lower() not in ("http", "https") or not rest:
        meant = (rest if separator else scheme) or "localhost:8000"
        raise ClientError(f"expected an address such as http://{meant}")
    address = httpx.URL(str(url).strip())
    if address.query or address.fragment:
        raise ClientError("expected an address without ? and #: each request has its own query")
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
        if not isinstance(timeout, int | float) or not timeout > 0:
            raise ValueError(f"timeout {timeout}: expected seconds above 0")
        timeout = httpx.Timeout(timeout, pool=None)
    return {"base_url": address, "headers": headers, "timeout": timeout}


def _authorization(api_key: str) -> bytes:
    """Return the header with a key; raises `ClientError` for another text."""
    if not isinstance(api_key, str):
        raise TypeError(f"the api_key is of type {type(api_key).__name__}: expected str")
    key = api_key.strip()
    wrong = re.search(r"[\x00-\x20\x7f]", key)
    if wrong is not None:
        raise ClientError(f"the api_key contains {wrong[0]!r}: give the key alone")
    return f"Bearer {key}".encode()


def body(image: ImageSource) -> dict[str, Any]:
    """Return httpx's arguments for a request with one picture."""
    return {"content": file_bytes(image), "headers": {"Content-Type": "application/octet-stream"}}


def form(images: Sequence[ImageSource]) -> dict[str, Any]:
    """Return httpx's arguments for a request with several pictures."""
    if _is_picture(images):
        raise TypeError("expected a list of pictures, not one")
    arguments = _files_of(map(file_bytes, images))
    if not arguments["files"]:
        raise ValueError("the list of pictures is empty")
    return arguments


def _is_picture(images: object) -> bool:
    """Return whether an object is one picture; some pictures are sequences, too."""
    if isinstance(images, str | bytes | bytearray | os.PathLike):
        return True
    if hasattr(images, "getexif") or hasattr(images, "read"):
        return True
    shape = getattr(images, "shape", ())
    return len(shape) == 2 or (len(shape) == 3 and shape[2:] in _ARRAY_MODES)


def _files_of(contents: Iterable[bytes]) -> dict[str, Any]:
    return {"files": [(FIELD, (str(index), data)) for index, data in enumerate(contents)]}


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
    if image.id is None:
        raise ValueError(
            "the service did not keep the picture of this classification (VIT_RECENT_TTL is 0): "
            "send the picture"
        )
    parameters = query(**{"id": image.id, "model": image.model, **options})
    return Request("GET", "/attention", parse, parameters, pixels=[image._pixel])


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
        return str(value).lower()
    if isinstance(value, str) or not isinstance(value, Sequence):
        return str(value)
    if name == "text":
        return list(value)
    if name == "labels":
        return json.dumps(list(value), ensure_ascii=False)
    return ",".join(map(str, value))


def documents(content: bytes) -> list[AttentionDocument]:
    """Parse one map with its facts, or a list of them."""
    parsed = MAPS.validate_json(content)
    return parsed if isinstance(parsed, list) else [parsed]


def array(content: bytes) -> Array:
    """Parse a file of numpy's format."""
    import numpy as np  # noqa: PLC0415  slow to import, and few programs need it

    parsed: Array = np.load(io.BytesIO(content), allow_pickle=False)
    return parsed


def file_bytes(image: ImageSource) -> bytes:
    """Return the bytes of an image file; PIL images and arrays become PNG.

    PIL and numpy are recognised by their attributes, because importing them is slow.

    Raises:
        OSError: the file cannot be read.
        TypeError: the object is not a picture.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str):
        _require_path(image)
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if hasattr(image, "getexif"):
        return _png(cast("Image.Image", image))
    if hasattr(image, "read") and not isinstance(image, io.TextIOBase):
        return _rest(cast("IO[bytes]", image))
    try:
        pixels = memoryview(image)  # type: ignore[arg-type]  # numpy's stubs lack the buffer protocol
    except (TypeError, ValueError):
        raise TypeError(f"{_EXPECTED}, not {type(image).__name__}") from None
    shape = pixels.shape or ()
    if pixels.format == "B" and len(shape) == 1:
        return pixels.tobytes()  # the bytes of a file
    if pixels.format != "B" or len(shape) < 2 or shape[2:] not in _ARRAY_MODES:
        raise TypeError(f"{_EXPECTED}, not {getattr(image, 'dtype', 'an array')} {list(shape)}")
    from PIL import Image  # noqa: PLC0415  slow to import, and few programs need it

    return _png(Image.frombytes(_ARRAY_MODES[shape[2:]], (shape[1], shape[0]), pixels.tobytes()))


def _require_path(text: str) -> None:
    """Raise `FileNotFoundError` for a text that is a picture's URL or content."""
    if not text:
        raise FileNotFoundError("the path of the picture is empty")
    if text.lower().startswith(("http://", "https://", "s3://", "gs://")):
        raise FileNotFoundError(f"{text[:99]}: download the picture, and pass its path or bytes")
    if text.startswith("data:") or len(text) > _MAX_PATH:
        raise FileNotFoundError(f"{text[:20]}...: not a path; of base64, pass b64decode(text)")


def _rest(file: IO[bytes]) -> bytes:
    data = file.read()
    if not data:
        raise ValueError("the file is empty or was read to its end: call its seek(0) first")
    return data


def _png(image: Image.Image) -> bytes:
    """Return the image as PNG, with the EXIF orientation and without other metadata."""
    exif = image.getexif()
    orientation = type(exif)()
    orientation[_ORIENTATION_TAG] = exif.get(_ORIENTATION_TAG, 1)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", exif=orientation, compress_level=1)
    return file.getvalue()
