"""The bounds on decoding, each at its exact edge."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from model.errors import ImageTooLarge, InvalidImage
from model.images import colour
from model.images.decode import _check_pixels, _reason
from model.images.formats import jpeg, unpack
from model.images.preprocess import model_input
from tests.model.images.pictures import config, encode, insert_after_soi, jpeg_segment, png_chunk, scene

MAX_SIDE = 1_048_576


@pytest.mark.parametrize(
    ("size", "allowed"),
    [
        ((8, 8), True),
        ((65, 1), False),
        ((13, 5), False),
        ((MAX_SIDE, 0), True),
        ((0, MAX_SIDE), True),
        ((MAX_SIDE + 1, 0), False),
        ((0, MAX_SIDE + 1), False),
    ],
    ids=str,
)
def test_pixels_and_sides_are_bounded(size, allowed):
    if allowed:
        _check_pixels(size, 64)
    else:
        with pytest.raises(ImageTooLarge, match=f"{size[0]} x {size[1]}"):
            _check_pixels(size, 64)


@pytest.mark.parametrize(("size", "error"), [((8000, 8000), InvalidImage), ((5213, 12_277), ImageTooLarge)])
def test_by_default_a_picture_has_at_most_64_megapixels(size, error):
    head = b"".join(side.to_bytes(4, "big") for side in size) + b"\x08\0\0\0\0"  # of grey pixels that never come
    with pytest.raises(error):
        model_input(b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + png_chunk(b"IDAT", b""), config())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError("image file is\n truncated"), "image file is truncated"),
        (ValueError("a" * 200), "a" * 160),
        (SyntaxError("not a PNG file"), "not a PNG file"),
        (RuntimeError("no image"), "no image"),
        (OSError(5, "input/output error"), "it is truncated or corrupt"),
        (OSError(), "it is truncated or corrupt"),
        (KeyError("tile"), "it is truncated or corrupt"),
        (TypeError("'int' object"), "it is truncated or corrupt"),
    ],
    ids=repr,
)
def test_the_sender_is_told_what_the_reader_says_but_no_accident_inside_it(error, reason):
    assert _reason(error) == reason


# The range of numbers without one


@pytest.mark.parametrize(
    ("mode", "values", "expected"),
    [
        ("F", [0.0, 0.5], (0.0, 1.0)),
        ("F", [0.0, 1.0], (0.0, 1.0)),
        ("F", [0.5, 1.5], (0.0, 255.0)),
        ("F", [0.0, 255.0], (0.0, 255.0)),
        ("F", [0.0, 255.5], (0.0, 65535.0)),
        ("F", [0.0, 65536.0], (0.0, 65536.0)),
        ("F", [-0.5, 0.5], (-0.5, 0.5)),
        ("F", [np.nan, 0.25, -np.inf, np.inf], (0.0, 1.0)),
        ("I", [0, 1], (0.0, 255.0)),
        ("I", [3, 65535], (0.0, 65535.0)),
        ("I", [3, 65536], (3.0, 65536.0)),
        ("I", [-1, 1], (-1.0, 1.0)),
    ],
)
@pytest.mark.parametrize("piece", [1, 2, 1_000_000])
def test_the_likeliest_range_is_the_smallest_that_holds_every_number(mode, values, expected, piece, monkeypatch):
    monkeypatch.setattr(colour, "_PIECE_PIXELS", piece)
    kind = np.float32 if mode == "F" else np.int32
    for shape in ((1, -1), (-1, 1)):
        assert colour._range(Image.fromarray(np.array(values, kind).reshape(shape))) == expected


# The segments of a JPEG


@pytest.mark.parametrize("marker", [0x01, *range(0xD0, 0xD9), 0xC8, *range(0xF0, 0xFE)], ids=hex)
def test_exif_is_found_behind_a_marker_that_has_no_length(marker):
    data = encode(scene(16, 16), "JPEG", orientation=6)
    assert unpack(insert_after_soi(data, bytes([0xFF, marker]))).orientation == 6


@pytest.mark.parametrize("marker", [0xFE, 0xEF, 0xDB, 0xDD], ids=hex)
def test_what_stands_in_a_segment_is_no_marker(marker):
    other = encode(scene(16, 16), "JPEG", orientation=3)
    exif = other[other.index(b"\xff\xe1") : other.index(b"\xff\xe1") + 40]
    data = encode(scene(16, 16), "JPEG", orientation=6)
    assert unpack(insert_after_soi(data, jpeg_segment(marker, exif))).orientation == 6


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1_048_576])
def test_scans_are_counted_across_the_pieces_that_are_searched(piece, monkeypatch):
    monkeypatch.setattr(jpeg, "_SEARCH_BYTES", piece)
    data = b"\xff\xda\xff\xff\xda\xda\x00\xff\xda" * 3 + b"\xff"
    for start in range(4):
        assert jpeg._count_scans(data, start) == data.count(b"\xff\xda", start)


def test_only_the_first_exif_and_the_first_xmp_of_a_jpeg_count():
    def exif(orientation: int) -> bytes:
        data = encode(scene(16, 16), "JPEG", orientation=orientation)
        start = data.index(b"\xff\xe1")
        return data[start : start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")]

    def xmp(orientation: int) -> bytes:
        packet = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="%d"/>' % orientation
        return jpeg_segment(0xE1, packet)

    plain = io.BytesIO()
    scene(16, 16).save(plain, "JPEG")
    for segments, expected in (
        ((exif(6), exif(3)), 6),
        ((xmp(5), xmp(7)), 5),
        ((xmp(5), exif(3)), 3),
        ((xmp(5),), 5),
        ((), 1),
    ):
        assert unpack(insert_after_soi(plain.getvalue(), *segments)).orientation == expected
