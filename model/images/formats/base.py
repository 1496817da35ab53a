"""The base of the image formats: the picture that goes to the decoder, and bounds on a file's parts."""

from __future__ import annotations

import io
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from PIL import ImageFile

from model.errors import InvalidImage

MinSize = Callable[[int, int], tuple[int, int]]
"""From an upright (width, height) in pixels to the smallest (width, height) that it may be decoded at."""

MAX_PARTS = 65_536
"""Segments, chunks or blocks in a file. Honest files have at most a few thousand."""

_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1}
"""Bytes of a pixel in Pillow's memory; I;16 has 2, all others 4, RGB too."""


@dataclass(frozen=True)
class EncodedImage(ABC):
    """The first picture of a file as its decoder gets it; each format is a subclass.

    Attributes:
        name: the format's name in Pillow.
        magic: what a file of the format begins with.
        reader: Pillow's class that decodes it; None where this installation has no codec for it.
        unsupported: the answer to the sender of such a file where `reader` is None.
        opening_bytes: bytes that the reader allocates for each pixel of `size` when it opens the file.
        data: the encoded picture, of most formats without metadata.
        orientation: Exif orientation 1...8; None where only the reader can tell, once the file is open.
        size: (width, height) in pixels, of formats whose reader allocates them when it opens the file.
        scans: how many times decoding goes over the whole picture.
    """

    name: ClassVar[str]
    magic: ClassVar[re.Pattern[bytes]]
    reader: ClassVar[type[ImageFile.ImageFile] | None]
    unsupported: ClassVar[str] = ""
    opening_bytes: ClassVar[float] = 1.0

    data: bytes
    orientation: int | None = None
    size: tuple[int, int] | None = None
    scans: int = 1

    @classmethod
    def matches(cls, data: bytes | bytearray) -> bool:
        """Return whether the file is of this format."""
        return cls.magic.match(data) is not None

    @classmethod
    @abstractmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Take a file of this format apart; the result keeps no reference to a bytearray.

        Raises:
            UnsupportedImageFormat: the file is of a kind that is not read.
            InvalidImage: it is cut off before the first picture begins, or made of absurdly many parts.
        """

    def open(self) -> ImageFile.ImageFile:
        """Return Pillow's image with its header read and its pixels not yet decoded."""
        assert self.reader is not None
        return self.reader(io.BytesIO(self.data))

    def draft(self, image: ImageFile.ImageFile, min_size: MinSize) -> int:
        """Let the decoder scale the opened image down by 2, 4 or 8 where it can; return that factor, else 1."""
        return 1

    def decoding_bytes(self, image: ImageFile.ImageFile, scale: int) -> float:
        """Return the bytes that decoding holds at its peak for each pixel of the stored picture."""
        return float(pixel_bytes(image))


def pixel_bytes(image: ImageFile.ImageFile) -> int:
    """Return the bytes of one decoded pixel."""
    return 2 if image.mode.startswith("I;16") else _PIXEL_BYTES.get(image.mode, 4)


def bounded_parts() -> Iterator[int]:
    """Count a file's parts; more than `MAX_PARTS` raise `InvalidImage`."""
    yield from range(MAX_PARTS)
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")
