"""Which uploads a device may decode in place of Pillow: plain baseline JPEGs, of which both take the same ones.

A device's decoder is not as strict as libjpeg, nor strict in the same places: one may fill up what is cut off, another
may guess at tables that are missing. So whatever is not beyond doubt here is left to Pillow, which then decides. For
what is let through, libjpeg has no fatal error left: it takes any data between the header of the only scan and the end
of the picture, with a warning that Pillow does not look at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.config import PreprocessConfig
from model.errors import InvalidImage
from model.images.decode import MAX_SIDE
from model.images.exif import UPRIGHT
from model.images.formats.jpeg import Jpeg
from model.images.preprocess import resized_size
from model.images.region import Region, seen_region
from model.prediction import EncodedPicture

MAX_BYTES: Final = 1 << 20
"""Bytes of the longest JPEG that goes to a device; web photographs have 100 to 500 thousand."""

MAX_PIXELS: Final = 16_000_000
"""Pixels of the largest: a device holds 15 bytes for each of them meanwhile."""

_MAX_ENLARGED: Final = 16
"""How many times the pixels of the model's input a resized picture may have before it is cropped: a narrow strip has
many times as many as are seen."""

_SOI, _EOI, _SOS, _SOF0, _DHT, _DQT, _DRI = 0xD8, 0xD9, 0xDA, 0xC0, 0xC4, 0xDB, 0xDD
_JFIF, _ADOBE = 0xE0, 0xEE
_SUBSAMPLING = {0x11, 0x21, 0x12, 0x22}
"""Horizontal and vertical sampling factors of the luminance: 4:4:4, 4:2:2, 4:4:0 and 4:2:0."""

_MAX_TABLES = 4
"""Tables of a kind, of which a hostile file could have a hundred thousand."""

_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""The first marker that is not part of a scan's data: neither a stuffed byte nor a restart."""

_LEAST_JFIF = 14
"""Bytes of a JFIF segment without a thumbnail; Pillow fails on less than 7."""


class DevicePicture(NamedTuple):
    """A picture for the device, and the part of the upright photo that the model will see of it."""

    encoded: EncodedPicture
    region: Region


class _Unsuited(Exception):
    """The file is not beyond doubt; this never leaves the module."""


def device_picture(data: bytes | bytearray, config: PreprocessConfig, *, max_pixels: int) -> DevicePicture | None:
    """Return an upload as a device decodes it, or None where Pillow is to decode it or to say what is wrong with it.

    Args:
        data: the whole file.
        config: the checkpoint's preprocessing.
        max_pixels: how many pixels a picture may have, as of `model.images.preprocess.model_input`.
    """
    if not Jpeg.matches(data) or len(data) > 2 * MAX_BYTES:  # metadata is left out below
        return None
    try:
        jpeg = Jpeg.parse(data)
        size, end = _check(jpeg.data)
    except (_Unsuited, IndexError, InvalidImage):
        return None
    if end > MAX_BYTES or size[0] * size[1] > min(max_pixels, MAX_PIXELS) or max(size) > MAX_SIDE:
        return None
    orientation = jpeg.orientation or UPRIGHT
    upright = size[::-1] if orientation >= 5 else size
    resized = resized_size(*upright, config)
    if resized[0] * resized[1] > _MAX_ENLARGED * config.size[0] * config.size[1]:
        return None
    return DevicePicture(EncodedPicture(jpeg.data[:end], size, orientation), seen_region(upright, resized, config))


def _check(data: bytes) -> tuple[tuple[int, int], int]:
    """Return (width, height), and where the picture ends; raises `_Unsuited` or `IndexError` at any doubt."""
    frame = b""
    interval = 0
    quantisation: set[int] = set()
    huffman: set[int] = set()
    for marker, payload, position in _segments(data):
        if marker == _DQT:
            _add(_quantisation_tables(payload), quantisation)
        elif marker == _DHT:
            _add(_huffman_tables(payload), huffman)
        elif marker == _SOF0 and not frame:
            frame = payload
        elif marker == _ADOBE:
            _require(payload[:5] == b"Adobe" and len(payload) == 12 and payload[11] == 1)  # YCbCr
        elif marker == _SOS:
            _require(bool(frame))
            size = _check_frame(frame, quantisation)
            _check_scan(payload, frame, huffman)
            end = _AFTER_SCAN.search(data, position)
            _require(end is not None and end[0][-1] == _EOI and end.start() > position)
            assert end is not None
            _check_data(data[position : end.start()], size, frame, interval)
            return size, end.end()
        elif marker == _DRI:
            _require(len(payload) == 2 and not interval)
            interval = int.from_bytes(payload, "big")
        else:
            _require(marker == _JFIF and len(payload) >= _LEAST_JFIF)
    raise _Unsuited


def _require(condition: bool) -> None:
    if not condition:
        raise _Unsuited


def _add(tables: list[int], known: set[int]) -> None:
    """Add tables to those that are known, none of them a second time."""
    _require(len(known | {*tables}) == len(known) + len(tables))
    known.update(tables)


def _segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield marker, content and end of each segment up to the first scan's header."""
    _require(data[:2] == bytes((0xFF, _SOI)))
    position = 2
    while True:
        _require(data[position] == 0xFF)
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        end = position + 2 + length
        _require(length >= 2 and end < len(data))
        yield marker, data[position + 4 : end], end
        position = end


def _quantisation_tables(payload: bytes) -> list[int]:
    """Return the numbers of the tables, of 8 bits a value, in a DQT segment."""
    _require(0 < len(payload) <= 65 * _MAX_TABLES and len(payload) % 65 == 0)
    tables = [payload[start : start + 65] for start in range(0, len(payload), 65)]
    _require(all(table[0] < 4 and 0 not in table[1:] for table in tables))
    return [table[0] for table in tables]


def _huffman_tables(payload: bytes) -> list[int]:
    """Return the class and number, as one byte, of each table in a DHT segment whose codes can be made."""
    tables: list[int] = []
    position = 0
    while position < len(payload):
        _require(len(tables) < _MAX_TABLES)
        name, counts = payload[position], payload[position + 1 : position + 17]
        symbols = payload[position + 17 : position + 17 + sum(counts)]
        _require(name & 0xEF < 2 and len(counts) == 16 and 0 < sum(counts) == len(symbols) <= 256)
        _require(name >= 0x10 or max(symbols) <= 11)  # the largest difference of 8-bit samples
        _require(len(set(symbols)) == len(symbols))
        code = 0
        for bits, count in enumerate(counts, 1):
            code += count
            # The code of all ones is not used (ITU-T T.81, C.2).
            _require(code < 1 << bits)
            code <<= 1
        tables.append(name)
        position += 17 + len(symbols)
    _require(position == len(payload))
    return tables


def _check_frame(frame: bytes, quantisation: set[int]) -> tuple[int, int]:
    """Return (width, height) of a frame of 8-bit greyscale or YCbCr."""
    height, width, count = int.from_bytes(frame[1:3], "big"), int.from_bytes(frame[3:5], "big"), frame[5]
    components: NDArray[np.uint8] = np.frombuffer(frame, np.uint8, offset=6)
    _require(frame[0] == 8 and height > 0 and width > 0 and count in (1, 3) and len(components) == 3 * count)
    names, sampling, tables = components.reshape(count, 3).T.tolist()
    _require(set(tables) <= quantisation)
    if count == 1:
        _require(sampling == [0x11])
    else:
        _require(names == [1, 2, 3] and sampling[0] in _SUBSAMPLING and sampling[1:] == [0x11, 0x11])
    return width, height


def _check_scan(scan: bytes, frame: bytes, huffman: set[int]) -> None:
    """Require a scan of all components of the frame, in its order, whose tables are there."""
    count = frame[5]
    _require(len(scan) == 4 + 2 * count and scan[0] == count and scan[-3:] == bytes((0, 63, 0)))
    for place in range(count):
        name, tables = scan[1 + 2 * place], scan[2 + 2 * place]
        _require(name == frame[6 + 3 * place])
        _require({tables >> 4, 0x10 | tables & 0x0F} <= huffman)


def _check_data(data: bytes, size: tuple[int, int], frame: bytes, interval: int) -> None:
    """Require as many bits as the picture has at least, and its restarts, all of them and in order."""
    width, height = size
    # Two codes a block of 8 x 8: one for its mean, one for the others or for their end.
    _require(8 * len(data) >= 2 * (width // 8) * (height // 8))
    across, down = (frame[7] >> 4, frame[7] & 0x0F) if frame[5] == 3 else (1, 1)
    units = -(-width // (8 * across)) * -(-height // (8 * down))
    values: NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    restarts = values[1:][(values[:-1] == 0xFF) & (values[1:] & 0xF8 == 0xD0)] & 7
    _require(len(restarts) == (-(-units // interval) - 1 if interval else 0))
    _require(bool((restarts == np.arange(len(restarts)) % 8).all()))
