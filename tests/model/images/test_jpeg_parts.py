"""Which parts of a JPEG file are kept, by their markers (ITU T.81, table B.1), and which scans do not show."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from PIL import Image

from model.images.formats import unpack
from model.images.formats.jpeg import Jpeg
from tests.model.images.pictures import encode, insert_after_soi, jpeg_segment, noise, scene

STANDALONE = {0x01, 0xC8, *range(0xD0, 0xDA), *range(0xF0, 0xFE)}
"""TEM, JPG, RST, SOI, EOI and JPGn: no length follows."""

METADATA = {*range(0xE0, 0xF0), 0xFE}
"""APPn and COM."""

ARITHMETIC = {0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}
"""Frames that are refused."""

BASELINE = encode(scene(), "JPEG")


def parsed(data: bytes) -> Jpeg:
    picture = unpack(data)
    assert isinstance(picture, Jpeg)
    return picture


@pytest.mark.parametrize("marker", sorted({*range(0x01, 0xFF)} - {0xDA} - ARITHMETIC), ids=hex)
def test_a_segment_is_kept_dropped_or_none_by_its_marker(marker: int) -> None:
    segment = jpeg_segment(marker, b"abcdef")
    kept = segment[:2] if marker in STANDALONE else b"" if marker in METADATA else segment
    plain = parsed(BASELINE).data
    assert parsed(insert_after_soi(BASELINE, segment)).data == plain[:2] + kept + plain[2:]


@pytest.mark.parametrize("marker", sorted(METADATA), ids=hex)
@pytest.mark.parametrize("body", [b"JFIF\0more", b"Adobe more"])
def test_what_tells_the_colours_is_kept(marker: int, body: bytes) -> None:
    segment = jpeg_segment(marker, body)
    plain = parsed(BASELINE).data
    assert parsed(insert_after_soi(BASELINE, segment)).data == plain[:2] + segment + plain[2:]


def test_an_empty_segment_of_a_jpeg_does_not_hide_the_next():
    turned = encode(scene(), "JPEG", 6)
    empty = insert_after_soi(turned, b"\xff\xfe\0\2")

    assert unpack(empty).orientation == unpack(turned).orientation == 6
    assert unpack(empty).data == unpack(turned).data


@pytest.mark.parametrize("scale", [4, 8])
def test_a_progressive_jpeg_without_its_fine_scans_ends_with_the_end_of_the_picture(scale):
    data = encode(noise(64, 48), "JPEG", progressive=True, subsampling="4:4:4")
    plain, followed = unpack(data), unpack(data + b"more")
    assert isinstance(plain, Jpeg)
    assert isinstance(followed, Jpeg)

    shorter = plain.without_fine_scans(scale, {1, 2, 3})

    assert shorter is not None
    assert len(shorter) < len(data)
    assert shorter.endswith(b"\xff\xd9")
    assert followed.without_fine_scans(scale, {1, 2, 3}) == shorter
    assert plain.without_fine_scans(2, {1, 2, 3}) is None
    assert plain.without_fine_scans(scale, set()) is None
    for (header, body), (_, kept) in zip(scans(data), scans(shorter), strict=True):
        first_frequency, bits = header[-3], header[-1]
        left_out = first_frequency > 0 and (scale == 8 or bits == 0x10)
        assert kept == (b"" if left_out else body)


def scans(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the header of each scan of a JPEG file, and its data up to the next marker."""
    pieces = data.split(b"\xff\xda")[1:]
    lengths = [int.from_bytes(piece[:2], "big") for piece in pieces]
    return [
        (piece[:length], re.split(rb"\xff(?!\0)", piece[length:])[0])
        for piece, length in zip(pieces, lengths, strict=True)
    ]


def with_long_tables(data: bytes) -> bytes:
    """Return a JPEG file whose Huffman tables stand in their segments 20 times, as long ones may hold several."""
    pieces = data.split(b"\xff\xc4")
    for number, piece in enumerate(pieces[1:], 1):
        length = int.from_bytes(piece[:2], "big")
        pieces[number] = (2 + 20 * (length - 2)).to_bytes(2, "big") + 20 * piece[2:length] + piece[length:]
    return b"\xff\xc4".join(pieces)


@pytest.mark.parametrize("scale", [4, 8])
def test_tables_between_scans_may_be_of_any_length(scale):
    data = encode(noise(64, 48), "JPEG", progressive=True, subsampling="4:4:4")
    plain, long = unpack(data), unpack(with_long_tables(data))
    assert isinstance(plain, Jpeg)
    assert isinstance(long, Jpeg)

    shorter = plain.without_fine_scans(scale, {1, 2, 3})

    assert shorter is not None
    assert long.without_fine_scans(scale, {1, 2, 3}) == with_long_tables(shorter)
    with Image.open(io.BytesIO(long.data)) as picture:
        assert np.array_equal(np.asarray(picture), np.asarray(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("scale", [1, 2])
def test_every_scan_of_a_progressive_jpeg_shows_at_half_its_size(scale):
    picture = unpack(encode(noise(64, 48), "JPEG", progressive=True, subsampling=0))

    assert isinstance(picture, Jpeg)
    assert picture.without_fine_scans(scale, {1, 2, 3}) is None
    assert picture.without_fine_scans(8, {1, 2, 3}) is not None
