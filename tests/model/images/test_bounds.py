"""The bounds on decoding and what it is said to cost, each at its exact edge."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.errors import ImageTooLarge, InvalidImage
from model.images import colour
from model.images.control import UNCONTROLLED
from model.images.decode import _check_memory, _check_pixels, _check_scans, _reason
from model.images.formats import jpeg, unpack
from model.images.preprocess import model_input
from tests.model.images.pictures import config, encode, insert_after_soi, jpeg_segment, noise, png_chunk, scene

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


def test_memory_is_six_and_a_half_bytes_for_each_pixel_that_is_allowed():
    _check_memory("PNG", (13, 100), 4.0, 800)  # 5200 bytes
    with pytest.raises(ImageTooLarge, match=r"this PNG picture of 13 x 100 pixels takes 0 MB: at most 0 are allowed"):
        _check_memory("PNG", (13, 100), 4.0, 799)
    with pytest.raises(ImageTooLarge, match=r"takes 400 MB: at most 390 are allowed"):
        _check_memory("PNG", (10_000, 10_000), 4.0, 60_000_000)


@pytest.mark.parametrize(
    ("scans", "size", "allowed"),
    [(1_000, (1, 1), True), (1_001, (1, 1), False), (20, (10, 10), True), (40, (10, 5), True), (21, (10, 10), False)],
)
def test_a_jpeg_may_be_gone_over_so_many_times(scans, size, allowed):
    encoded: Any = SimpleNamespace(scans=scans)
    if allowed:
        _check_scans(encoded, size, 100)
    else:
        with pytest.raises(InvalidImage, match=f"{scans} scans"):
            _check_scans(encoded, size, 100)


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


COSTS: dict[str, list[tuple[Any, ...]]] = {
    "JPEG": [("RGB", {}, 1, 0.5), ("RGB", {}, 2, 0.25), ("RGB", {}, 8, 0.25), ("RGB", {"progressive": True}, 1, 1.3),
             ("RGB", {"progressive": True}, 4, 0.8)],
    "PNG": [("RGB", {}, 1, 1.0), ("RGBA", {}, 1, 4 / 3), ("L", {}, 1, 1 / 3), ("I;16", {}, 1, 2 / 3)],
    "GIF": [("P", {}, 1, 0.5)],
    "BMP": [("RGB", {}, 1, 0.5)],
    "WEBP": [("RGB", {}, 1, 2.5)],
    "AVIF": [("RGB", {}, 1, 3.0)],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "mode", "options", "scale", "cost"), [(name, *row) for name, rows in COSTS.items() for row in rows]
)
def test_what_a_pixel_costs_beside_one_of_a_png(name, mode, options, scale, cost):
    image = Image.new(mode, (16, 16)) if mode in ("P", "I;16") else noise(16, 16).convert(mode)
    encoded = unpack(encode(image, name, **options))
    assert encoded.cost(encoded.open(UNCONTROLLED), scale) == pytest.approx(cost)


def test_a_bmp_of_run_lengths_costs_by_its_bytes():
    palette = bytes(4 * 256)
    rows = b"\x10\x05\x00\x00" * 4 + b"\x00\x01"  # 16 pixels, the end of a row; the end
    offset = 14 + 40 + len(palette)
    head = b"BM" + (offset + len(rows)).to_bytes(4, "little") + bytes(4) + offset.to_bytes(4, "little")
    info = np.array([40, 16, 4], "<u4").tobytes() + np.array([1, 8], "<u2").tobytes()
    info += np.array([1, len(rows), 0, 0, 256, 0], "<u4").tobytes()
    data = head + info + palette + rows
    encoded = unpack(data)
    image = encoded.open(UNCONTROLLED)
    assert encoded.cost(image, 1) == 0.5 + 30 * len(data) / (16 * 4)
    image.load()
    assert image.getextrema() == (5, 5)


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
