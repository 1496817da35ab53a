"""The base of the image formats: the picture that goes to the decoder, and bounds on a file's parts."""

from __future__ import annotations

import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from PIL import ImageFile

from model.errors import InvalidImage
from model.images.control import WorkControl

MinSize = Callable[[int, int], tuple[int, int]]
"""From an upright (width, height) in pixels to the smallest (width, height) that it may be decoded at."""

MAX_PARTS = 65_536
"""Segments, chunks or blocks in a file. Honest files have at most a few thousand."""

_PIXEL_BYTES = {"1": 1, "L": 1, "P": 1}
"""Bytes of a pixel in Pillow's memory; I;16 has 2, all others 4, RGB too."""


class ControlledFile(io.BytesIO):
    """A file in memory that asks its control, for every `piece` bytes read, whether they are still wanted."""

    def __init__(self, data: bytes, control: WorkControl, piece: int) -> None:
        super().__init__(data)
        self.control = control
        self._piece = piece
        self._unchecked = 0

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to `size` bytes; raises what the control raises."""
        # A reader in Python takes byte by byte, for each of which a check would cost more than the reading.
        self._unchecked += self._piece if size is None or size < 0 else size
        if self._unchecked >= self._piece:
            self._unchecked = 0
            self.control.check()
        return super().read(size)


@dataclass(frozen=True)
class EncodedImage(ABC):
    """The first picture of a file as its decoder gets it; each format is a subclass.

    Attributes:
        name: the format's name in Pillow.
        magic: what a file of the format begins with.
        reader: Pillow's class that decodes it; None where this installation has no codec for it.
        unsupported: the answer to the sender of such a file where `reader` is None.
        opening_bytes: bytes that the reader allocates for each pixel of `size` when it opens the file.
        piece_bytes: bytes of the file that the decoder gets at a time, so that work on each takes a tenth of a second.
        max_cost: what decoding may cost (see `cost`) for each pixel that is allowed.
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
    piece_bytes: ClassVar[int] = 65_536
    max_cost: ClassVar[float] = math.inf

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

    def open(self, control: WorkControl) -> ImageFile.ImageFile:
        """Return Pillow's image with its header read and its pixels not yet decoded; raises what `control` raises."""
        assert self.reader is not None
        image = self.reader(ControlledFile(self.data, control, self.piece_bytes))
        image.decodermaxblock = self.piece_bytes
        return image

    def draft(self, image: ImageFile.ImageFile, min_size: MinSize) -> int:
        """Let the decoder scale the opened image down by 2, 4 or 8 where it can; return that factor, else 1."""
        return 1

    def decoding_bytes(self, image: ImageFile.ImageFile, scale: int) -> float:
        """Return the bytes that decoding holds at its peak for each pixel of the stored picture."""
        return float(pixel_bytes(image))

    @abstractmethod
    def cost(self, image: ImageFile.ImageFile, scale: int) -> float:
        """Return how many pixels of an 8-bit RGB PNG take as long to decode as one of the stored picture, at most."""


def pixel_bytes(image: ImageFile.ImageFile) -> int:
    """Return the bytes of one decoded pixel."""
    return 2 if image.mode.startswith("I;16") else _PIXEL_BYTES.get(image.mode, 4)


def bounded_parts() -> Iterator[int]:
    """Count a file's parts; more than `MAX_PARTS` raise `InvalidImage`."""
    yield from range(MAX_PARTS)
    raise InvalidImage(f"the file is made of more than {MAX_PARTS} parts")
