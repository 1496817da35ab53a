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

_PIECE_BYTES = 262_144
"""Bytes of the file that a decoder gets at a time: most pictures at once."""


@dataclass(frozen=True)
class EncodedImage(ABC):
    """The first picture of a file as its decoder gets it; each format is a subclass.

    Attributes:
        name: the format's name in Pillow.
        magic: what a file of the format begins with.
        reader: Pillow's class that decodes it; None where this installation has no codec for it.
        unsupported: the answer to the sender of such a file where `reader` is None.
        may_be_bounded: there are files of this format whose work is `bounded`.
        data: the encoded picture, of most formats without metadata.
        orientation: Exif orientation 1...8; None where only the reader can tell, once the file is open.
        size: (width, height) in pixels, where the file tells it before it is opened.
        bounded: the structure of the file proves that decoding takes less than 0.5 s and 180 MB, whatever its data are.
    """

    name: ClassVar[str]
    magic: ClassVar[re.Pattern[bytes]]
    reader: ClassVar[type[ImageFile.ImageFile] | None]
    unsupported: ClassVar[str] = ""
    may_be_bounded: ClassVar[bool] = False

    data: bytes
    orientation: int | None = None
    size: tuple[int, int] | None = None
    bounded: bool = False

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
        image = self.reader(io.BytesIO(self.data))
        image.decodermaxblock = _PIECE_BYTES
        return image

    def draft(self, image: ImageFile.ImageFile, min_size: MinSize) -> int:
        """Let the decoder scale the opened image down by 2, 4 or 8 where it can; return that factor, else 1."""
        return 1


def bounded_parts() -> Iterator[int]:
    """Count a file's parts; more than `MAX_PARTS` raise `InvalidImage`."""
    yield from range(MAX_PARTS)
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")
