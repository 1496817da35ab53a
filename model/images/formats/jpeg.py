"""JPEG (ITU-T T.81, annex B). A multi-picture MPO begins with a whole JPEG and is read as JPEG."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Self

import numpy as np
from PIL import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from model.errors import UnsupportedImageFormat
from model.images.exif import UPRIGHT, read_orientation
from model.images.formats.base import MAX_PARTS, EncodedImage, MinSize, bounded_parts

_MARKER = re.compile(rb"\xff[^\x00\xff]")
_STANDALONE = {0x01, *range(0xD0, 0xDA), 0xC8, *range(0xF0, 0xFE)}
"""Markers that no length follows, as libjpeg and Pillow take them: TEM, RST, SOI, EOI and the reserved JPGn."""

_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ARITHMETIC = {marker for marker in _FRAMES if marker > 0xC8}
_HUFFMAN = {0xC0, 0xC1}
_PROGRESSIVE = 0xC2
_DCT = {0xC0, 0xC1, 0xC2}
"""Frames made of cosine transforms; only those can be scaled (a lossless frame keeps its size)."""

_MAX_BOUNDED_SEGMENTS = 1_024
_MAX_BOUNDED_FILE = 16_777_216
_MAX_BOUNDED_PIXELS = 26_000_000
"""A photo of 24 megapixels; 0.1 to 0.3 s."""

_MAX_BOUNDED_COEFFICIENTS = 40_000_000
"""Of a picture that is decoded as a whole: 80 MB, the photo of 24 megapixels with half of the chroma in each way."""

_MAX_BOUNDED_PASSES = 400_000_000
"""Coefficients times scans: a scan without new data takes 0.7 ns for each."""

_SCAN_COEFFICIENTS = 400_000
"""What a scan counts beside its coefficients, so that there are at most a thousand."""

_SOS = 0xDA
_SCAN, _HUFFMAN_TABLES, _RESTART_INTERVAL, _END_OF_IMAGE = b"\xff\xda", b"\xff\xc4", b"\xff\xdd", b"\xff\xd9"
_NO_SCAN_DATA = re.compile(rb"\xff[^\x00]")
"""What cannot stand in the data of a scan without restarts: all but stuffed bytes."""

_APP1 = 0xE1
_METADATA = {*range(0xE0, 0xF0), 0xFE}
_COLOUR_SEGMENTS = (b"JFIF\0", b"Adobe")
"""The application segments that say which colours the components are."""

_EXIF_PREFIX, _XMP_PREFIX = b"Exif\0\0", b"http://ns.adobe.com/xap/1.0/\0"

_SEARCH_BYTES = 1_048_576
"""Bytes searched at a time; a few times as many are held meanwhile."""


@dataclass(frozen=True)
class Jpeg(EncodedImage):
    """A JPEG file without application segments, comments and what follows the picture.

    Attributes:
        scalable: the decoder can make the picture at 1/2, 1/4 and 1/8.
        first_scan: progressive JPEG, Huffman codes: where in `data` the header of the first scan begins.
    """

    name = "JPEG"
    magic = re.compile(rb"\xff\xd8\xff")
    reader = JpegImageFile
    may_be_bounded = True

    scalable: bool = False
    first_scan: int | None = None

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self:
        """Keep the segments of the picture; read the orientation from the others."""
        view = memoryview(data)
        kept = [view[:2]]
        exif = xmp = None
        frame, header = 0, b""
        bounded, first_scan = False, None
        for number, (marker, begin, start, position) in enumerate(_segments(data, 2)):
            if marker == _SOS:
                if frame == _PROGRESSIVE:
                    first_scan = sum(map(len, kept))
                kept.append(view[begin:])
                # Such a decoder holds all coefficients before it makes the first pixel.
                buffered = frame == _PROGRESSIVE or data[start + 2 : start + 3] < header[7:8]
                scans = _count_scans(data, start) + 1 if buffered else 0
                small = number < _MAX_BOUNDED_SEGMENTS and len(data) <= _MAX_BOUNDED_FILE
                bounded = small and frame in _DCT and _is_bounded(header, scans)
                break
            if marker in _ARITHMETIC:
                raise UnsupportedImageFormat("JPEG pictures with arithmetic coding are not read: no browser shows them")
            if marker in _METADATA and not data.startswith(_COLOUR_SEGMENTS, start + 2):
                if marker == _APP1:
                    segment = bytes(view[start + 2 : position])
                    if exif is None and segment.startswith(_EXIF_PREFIX):
                        exif = segment
                    elif xmp is None and segment.startswith(_XMP_PREFIX):
                        xmp = segment
            else:
                kept.append(view[begin:position])
            if marker in _FRAMES:
                frame, header = marker, bytes(view[start:position])
        return cls(
            b"".join(kept),
            orientation=read_orientation(exif, xmp),
            bounded=bounded,
            scalable=frame in _DCT,
            first_scan=first_scan,
        )

    def draft(self, image: ImageFile.ImageFile, min_size: MinSize) -> int:
        """Let the decoder scale down as far as `min_size` allows, and leave out what then does not show."""
        if not self.scalable:
            return 1
        width, height = image.size
        swapped = (self.orientation or UPRIGHT) >= 5
        min_width, min_height = min_size(height, width)[::-1] if swapped else min_size(width, height)
        for scale in (8, 4, 2):
            if width >= scale * min_width and height >= scale * min_height:
                # Pillow takes the largest scale that leaves at least this size: the scale of this loop.
                image.draft(None, (width // scale, height // scale))
                shorter = self.without_fine_scans(scale, _not_subsampled(image))
                if shorter is not None:
                    image.fp = io.BytesIO(shorter)
                return scale
        return 1

    def without_fine_scans(self, scale: int, components: Set[int]) -> bytes | None:
        """Return a progressive JPEG's data without what does not show at 1/4 or 1/8; None where nothing is left out.

        * At 1/8 libjpeg makes one sample of a block, from its mean (the DC coefficient): the other frequencies (AC)
          of components that are not subsampled change nothing. They are most of the file.
        * At 1/4 those components' lowest AC bit is left out: with most encoders a third of the file.

        Whether the file is valid is not touched. All scan headers and tables stay, and are judged by the decoder, for
        which nothing between two markers of a scan's data is an error; that the data of every scan ends with a
        marker, and that the last is the end of the picture, is judged here.

        Args:
            components: identifiers of those that are not subsampled.
        """
        data, position = self.data, self.first_scan
        if scale < 4 or position is None or _RESTART_INTERVAL in data[:position]:
            return None
        view = memoryview(data)
        kept: list[memoryview] = []
        done = 0
        for _ in range(MAX_PARTS):
            marker = data[position : position + 2]
            end = position + 2 + int.from_bytes(data[position + 2 : position + 4], "big")
            if marker == _END_OF_IMAGE:
                break
            if marker == _SCAN:
                following = _NO_SCAN_DATA.search(data, end)
                if following is None:
                    return None
                header = data[position + 4 : end]
                # The components' number, of each its identifier and tables; first and last frequency, bits before
                # and now.
                one_component = len(header) == 6 and header[0] == 1 and header[1] in components
                if one_component and header[3] > 0 and (scale == 8 or header[5] == 0x10):
                    kept.append(view[done:end])
                    done = following.start()
                end = following.start()
            elif marker != _HUFFMAN_TABLES:
                return None
            position = end
        else:
            return None
        return b"".join((*kept, view[done : position + 2])) if kept else None


def _segments(data: bytes | bytearray, position: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (marker, where it begins, where its payload begins, where that ends) of each segment from `position` on."""
    for _ in bounded_parts():
        # Fill bytes and rubbish before a marker are legal, and left out: Pillow goes through them one by one.
        match = _MARKER.search(data, position)
        if match is None:
            return
        begin, marker, position = match.start(), match[0][1], match.end()
        start = position
        if marker not in _STANDALONE:
            position += max(2, int.from_bytes(data[start : start + 2], "big"))
        yield marker, begin, start, position


def _is_bounded(header: bytes, scans: int) -> bool:
    """Return whether the frame with this header, of 8 bits and so many scans (0: all at once), is of moderate size."""
    height, width = int.from_bytes(header[3:5], "big"), int.from_bytes(header[5:7], "big")
    factors = [(max(1, each >> 4), max(1, each & 15)) for each in header[9::3]] or [(1, 1)]
    finest = max(columns for columns, _ in factors), max(rows for _, rows in factors)
    # Blocks of 8 x 8 that fill up the last group of each row and column count too.
    groups = -(-width // (8 * finest[0])) * -(-height // (8 * finest[1]))
    coefficients = 64 * groups * sum(columns * rows for columns, rows in factors)
    return (
        header[2:3] == b"\x08"
        and width * height <= _MAX_BOUNDED_PIXELS
        and (scans == 0 or coefficients <= _MAX_BOUNDED_COEFFICIENTS)
        and scans * (coefficients + _SCAN_COEFFICIENTS) <= _MAX_BOUNDED_PASSES
    )


def has_baseline_frame(data: bytes | bytearray, position: int) -> bool:
    """Return whether the frame of the JPEG stream at `position` is sequential, with Huffman codes."""
    frames = (marker for marker, *_ in _segments(data, position) if marker in _FRAMES or marker == _SOS)
    return next(frames, _SOS) in _HUFFMAN


def _not_subsampled(image: ImageFile.ImageFile) -> set[int]:
    """Return the identifiers of the components that are sampled most finely."""
    assert isinstance(image, JpegImageFile)
    layers = image.layer  # of each the identifier, horizontal and vertical sampling factor, quantisation table
    finest = max(columns for _, columns, _, _ in layers), max(rows for _, _, rows, _ in layers)
    coarse = {name for name, columns, rows, _ in layers if (columns, rows) != finest}
    return {name for name, *_ in layers} - coarse


def _count_scans(data: bytes | bytearray, start: int) -> int:
    """Return how often the marker that begins a scan stands in `data` from `start` on.

    As `bytes.count`, which takes 8 times as long on a megabyte and holds the interpreter's lock meanwhile.
    """
    searched = np.frombuffer(data, np.uint8)[start:]
    count = 0
    for first in range(0, len(searched), _SEARCH_BYTES):
        piece = searched[first : first + _SEARCH_BYTES + 1]
        count += int(np.count_nonzero((piece[:-1] == 0xFF) & (piece[1:] == _SOS)))
    return count
