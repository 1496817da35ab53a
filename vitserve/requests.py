"""The requests of the service as data, which either client sends, and how their answers are read."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
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
)
from vitserve.errors import ForeignAnswer, error_of
from vitserve.shrinking import Pixel, shrink

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

# A path, the bytes of a file, a file open for binary reading, a PIL image, or a uint8 array: [rows,
# columns] is grey, [rows, columns, 3] is RGB and [rows, columns, 4] is RGBA.
ImageSource: TypeAlias = "str | Path | bytes | IO[bytes] | Image.Image | NDArray[np.uint8]"

_ORIENTATION = 0x0112
_PNG_MODES = ("1", "L", "LA", "I;16", "P", "RGB", "RGBA")
# By the axes after rows and columns.
_ARRAY_MODES = {(): "L", (1,): "L", (3,): "RGB", (4,): "RGBA"}

_EXPECTED = (
    "expected a path, bytes, a file open for binary reading, a PIL image, "
    "or a uint8 array [rows, columns] or [rows, columns, 1, 3 or 4]"
)

Array: TypeAlias = "NDArray[np.float32]"

# The parameter `attention` of /classify.
WithAttention = bool | Literal["relevance"]

Answer = TypeVar("Answer")

# Bytes of a file that is worth shrinking.
_MIN_BYTES = 16_384

MODELS = TypeAdapter(list[ListedModel])


class MapOptions(TypedDict, total=False):
    """Which map /attention computes; what is left out is the service's default.

    `class_` is an index or a label, or several of them: of `labels`, where they are given. `model`
    names one of the service's models; the map of a `Classification` is by the model that gave it.
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
        parse: returns the answer that the body of a successful response holds; ValueError or
        EOFError if it holds none.
        options: arguments of httpx.
        drawn: the answer is a drawing on the picture, which is sent as it is.
        pixels: the pixel of each picture that is sent or kept; none: they are the originals.
    """

    method: str
    path: str
    parse: Callable[[bytes], Answer]
    options: dict[str, Any] = field(default_factory=dict)
    drawn: bool = False
    pixels: Sequence[Pixel] = ()

    def read(self, response: httpx.Response) -> Answer:
        """Return the answer; raises `ClientError` if the response is a refusal or not one of
        vitserve.
        """
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
        """Whether it holds a file that may be worth shrinking, for the default model, whose size is
        known.
        """
        is_named = "model" in self.options.get("params", ())
        return not (self.drawn or is_named) and max(map(len, self._files), default=0) >= _MIN_BYTES

    def shrunk(self, side: int) -> Request[Answer]:
        """Return the request with pictures that are no larger than a service needs which resizes
        them to `side`.
        """
        small = [shrink(data, side) for data in self._files]
        files = [(FIELD, (str(index), each.data)) for index, each in enumerate(small)]
        parts: dict[str, Any] = (
            {"files": files} if "files" in self.options else {"content": small[0].data}
        )
        return replace(self, options=self.options | parts, pixels=[each.pixel for each in small])

    @property
    def _files(self) -> list[bytes]:
        one = [self.options["content"]] if "content" in self.options else []
        return one + [data for _, (_, data) in self.options.get("files", ())]


def body(image: ImageSource) -> dict[str, Any]:
    """Return httpx's arguments of a request with one picture."""
    return {"content": file_bytes(image), "headers": {"Content-Type": "application/octet-stream"}}


def form(images: Sequence[ImageSource]) -> dict[str, Any]:
    """Return httpx's arguments of a request with several pictures."""
    return {
        "files": [(FIELD, (str(index), file_bytes(image))) for index, image in enumerate(images)]
    }


def query(**parameters: object) -> dict[str, Any]:
    """Return httpx's arguments of a request with options; one that is None is the service's
    default.
    """
    given = {name.rstrip("_"): value for name, value in parameters.items() if value is not None}
    return {"params": {name: _text(name, value) for name, value in given.items()}}


def map_of(
    image: ImageSource | Classification, parse: Callable[[bytes], Answer], **options: object
) -> Request[Answer]:
    """Return the request for a map of an image that is sent, or that the service kept when it
    classified it.
    """
    if not isinstance(image, Classification):
        return Request("POST", "/attention", parse, body(image) | query(**options))
    if image.id is None:
        raise ValueError(
            "the service kept no picture of this classification (VIT_RECENT_TTL is 0): send the picture"
        )
    asked = query(**{"id": image.id, "model": image.model, **options})
    return Request("GET", "/attention", parse, asked, pixels=[image._pixel])


def _refer_to_originals(answer: object, pixels: Sequence[Pixel]) -> None:
    """Make the regions of an answer those of the originals of its pictures."""
    answers: Sequence[object] = (
        answer.results if isinstance(answer, BatchClassification) else [answer]
    )
    if isinstance(answer, Classifications):
        answers, pixels = list(answer.models.values()), [*pixels] * len(answer.models)
    for found, pixel in zip(answers, pixels, strict=False):
        if isinstance(found, Classification):
            found._pixel = pixel
        for each in found if isinstance(found, list) else [getattr(found, "attention", None)]:
            if each is not None:
                region = each.region
                region.x, region.width = region.x * pixel[0], region.width * pixel[0]
                region.y, region.height = region.y * pixel[1], region.height * pixel[1]


def _text(name: str, value: object) -> str | list[str]:
    """Return a parameter's value as the service reads it; labels and texts may have commas."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) or not isinstance(value, Sequence):
        return str(value)
    if name == "text":
        return list(value)
    return (
        json.dumps(list(value), ensure_ascii=False)
        if name == "labels"
        else ",".join(map(str, value))
    )


def documents(content: bytes) -> list[AttentionDocument]:
    """Parse one map with its facts, or a list of them."""
    parsed = MAPS.validate_json(content)
    return parsed if isinstance(parsed, list) else [parsed]


def array(content: bytes) -> Array:
    """Parse a file of numpy's format."""
    import numpy as np  # noqa: PLC0415  programs that ask for no array start quicker

    parsed: Array = np.load(io.BytesIO(content), allow_pickle=False)
    return parsed


def file_bytes(image: ImageSource) -> bytes:
    """Return the bytes of an image file: PIL images and arrays are encoded as PNG, everything else
    is a file already.

    Neither PIL nor numpy is imported for the others; their objects are recognised by what they can
    do.

    Raises:
        OSError: the file cannot be read.
        TypeError: this is no picture.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if hasattr(image, "getexif"):
        return _png(cast("Image.Image", image))
    if hasattr(image, "read") and not isinstance(image, io.TextIOBase):
        return image.read()
    try:
        pixels = memoryview(image)  # type: ignore[arg-type]  # numpy's stubs do not say that its arrays are buffers
    except (TypeError, ValueError):
        raise TypeError(f"{_EXPECTED}, not {type(image).__name__}") from None
    shape = pixels.shape or ()
    if pixels.format == "B" and len(shape) == 1:
        return pixels.tobytes()  # the bytes of a file
    if pixels.format != "B" or len(shape) < 2 or shape[2:] not in _ARRAY_MODES:
        raise TypeError(f"{_EXPECTED}, not {getattr(image, 'dtype', 'an array')} {list(shape)}")
    from PIL import Image  # noqa: PLC0415  programs that send files start quicker

    return _png(Image.frombytes(_ARRAY_MODES[shape[2:]], (shape[1], shape[0]), pixels.tobytes()))


def _png(image: Image.Image) -> bytes:
    """Return a PNG that lies as the file did from which the image was opened."""
    file, exif = io.BytesIO(), image.getexif()
    orientation = type(exif)()  # without where and when the photo was taken
    orientation[_ORIENTATION] = exif.get(_ORIENTATION, 1)
    if image.mode not in _PNG_MODES:
        image = image.convert("RGB")
    image.save(file, "PNG", exif=orientation, compress_level=1)
    return file.getvalue()
