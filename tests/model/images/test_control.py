"""Work on a picture that its caller follows and ends."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest

from model.errors import ImageTooLarge, InvalidImage
from model.images import resize
from model.images.control import UNCONTROLLED, WorkControl
from model.images.heatmap import draw_heatmap, encode_png
from model.images.photo import upright_photo
from model.images.preprocess import preprocess
from model.images.region import Region
from tests.model.images.pictures import black_png, config, encode, noise


class Unwanted(Exception):
    """Raised by a control: not an error that a decoder could have raised."""


class Counter(WorkControl):
    """Counts checks, of which the one numbered `last` fails."""

    def __init__(self, last: float = float("inf")) -> None:
        self.checks = 0
        self.costs: list[float] = []
        self._last = last

    def estimated(self, cost: float) -> None:
        self.costs.append(cost)

    def check(self) -> None:
        self.checks += 1
        if self.checks >= self._last:
            raise Unwanted


PIECES = {
    "png": (lambda: encode(noise(120, 120), "PNG"), 4096),
    "gif": (lambda: encode(noise(120, 120, 1), "GIF"), 4096),
    "jpeg": (lambda: encode(noise(700, 700), "JPEG", quality=95, subsampling=0), 262_144),
    "progressive jpeg": (lambda: encode(noise(800, 800), "JPEG", quality=60, subsampling=0, progressive=True), 262_144),
    "bmp": (lambda: encode(noise(300, 300), "BMP"), 65_536),
    "run-length bmp": (lambda: run_length_bmp(20_000), 65_536),
    "raw tiff": (lambda: encode(noise(300, 300), "TIFF"), 65_536),
}


def run_length_bmp(runs: int) -> bytes:
    """A grey BMP with one run of 2 bytes a row."""
    header = struct.pack("<IiiHHIIiiII", 40, 200, runs, 1, 8, 1, 0, 0, 0, 256, 0)
    offset = 14 + len(header) + 1024
    body = b"\xc8\x07\0\0" * runs
    return b"BM" + struct.pack("<IHHI", offset + len(body), 0, 0, offset) + header + bytes(1024) + body


@pytest.mark.parametrize("name", PIECES)
def test_a_decoder_asks_before_every_piece_whether_it_is_wanted(name: str) -> None:
    make, piece = PIECES[name]
    data = make()
    whole = Counter()
    expected = preprocess(data, config(), control=whole, scaled_decode=False)
    assert whole.checks >= len(data) // piece + 2  # the pieces, and before decoding and resizing
    assert np.array_equal(expected, preprocess(data, config(), scaled_decode=False))
    for last in {1, 2, whole.checks // 2, whole.checks}:
        ended = Counter(last)
        with pytest.raises(Unwanted):
            preprocess(data, config(), control=ended, scaled_decode=False)
        assert ended.checks == last


@pytest.mark.parametrize("name", ["WEBP", "AVIF", "TIFF"])
def test_a_codec_that_decodes_in_one_call_is_not_begun_when_it_is_not_wanted(name: str) -> None:
    options: dict[str, Any] = {"compression": "tiff_lzw"} if name == "TIFF" else {}
    data = encode(noise(40, 30), name, **options)
    whole = Counter()
    preprocess(data, config(), control=whole)
    with pytest.raises(Unwanted):
        preprocess(data, config(), control=Counter(whole.checks - 1))


def test_a_small_file_that_becomes_a_large_picture_is_decoded_in_many_steps() -> None:
    control = Counter()
    preprocess(black_png(2000, 2000, bits=16, colour_type=6), config(), control=control, max_pixels=4_000_000)
    assert control.checks > 5


def test_a_scaled_jpeg_that_is_shortened_is_followed_too() -> None:
    data = encode(noise(900, 900), "JPEG", progressive=True, quality=60, subsampling=2)
    whole = Counter()
    preprocess(data, config((32, 32)), control=whole)
    with pytest.raises(Unwanted):
        preprocess(data, config((32, 32)), control=Counter(whole.checks - 1))


def test_the_first_pass_of_a_resize_is_made_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "_STRIP_PIXELS", 1000)
    data = encode(noise(100, 100, 4).convert("RGBA"), "TIFF")
    control = Counter()
    preprocess(data, config(), control=control)
    assert control.checks > 10


@pytest.mark.parametrize(
    ("data", "pixels"),
    [
        (black_png(90, 100, bits=8, colour_type=2), 9000),
        (black_png(90, 100, bits=8, colour_type=0), 3000),
        (black_png(90, 100, bits=16, colour_type=6), 24_000),
        (encode(noise(90, 100), "JPEG"), 4500),
        (encode(noise(900, 1000), "JPEG"), 225_000),
        (encode(noise(90, 100), "JPEG", progressive=True), 9000),
        (encode(noise(90, 100), "WEBP"), 22_500),
        (encode(noise(90, 100), "AVIF"), 27_000),
        (encode(noise(90, 100), "GIF"), 4500),
        (encode(noise(90, 100), "BMP"), 4500),
        (run_length_bmp(100), 10_000 + 30 * len(run_length_bmp(100))),
        (encode(noise(90, 100), "TIFF", compression="tiff_lzw"), 9000),
        (encode(noise(90, 100), "TIFF", compression="lzma"), 36_000),
    ],
)
def test_the_cost_is_said_once_and_before_anything_is_decoded(data: bytes, pixels: float) -> None:
    class Refusing(Counter):
        def estimated(self, cost: float) -> None:
            super().estimated(cost)
            raise Unwanted

    control, whole = Refusing(), Counter()
    with pytest.raises(Unwanted):
        preprocess(data, config(), control=control)
    preprocess(data, config(), control=whole)
    assert control.costs == whole.costs == [pytest.approx(pixels)]


def tiff(strip: bytes, strips: int, rows: int, *, claimed: int | None = None) -> bytes:
    """A grey TIFF of width 64 whose strips, packed by deflate, all lie in the same place."""
    places = 8 + len(strip)
    directory = places + 8 * strips
    fields = [
        (256, 4, 1, 64),
        (257, 4, 1, rows * strips),
        (258, 3, 1, 8),
        (259, 3, 1, 8),
        (262, 3, 1, 1),
        (273, 4, strips, places if strips > 1 else 8),
        (278, 4, 1, rows),
        (279, 4, strips, places + 4 * strips if strips > 1 else len(strip)),
    ]
    entries = b"".join(struct.pack("<HHII", *field) for field in fields)
    arrays = struct.pack(f"<{strips}I", *[8] * strips) + struct.pack(f"<{strips}I", *[claimed or len(strip)] * strips)
    head = b"II*\0" + struct.pack("<I", directory) + strip
    return head + arrays + struct.pack("<H", len(fields)) + entries + bytes(4)


def test_strips_that_share_their_bytes_are_refused() -> None:
    strip = zlib.compress(np.random.default_rng(0).integers(0, 256, 64 * 16, np.uint8).tobytes())
    assert preprocess(tiff(strip, 1, 16), config()).shape == (32, 32, 3)
    with pytest.raises(InvalidImage, match="claim more data than the file has"):
        preprocess(tiff(strip, 16, 16), config())


def test_a_tiff_that_is_slow_to_unpack_may_have_fewer_pixels() -> None:
    lzma, lzw = (encode(noise(100, 100), "TIFF", compression=name) for name in ("lzma", "tiff_lzw"))
    assert preprocess(lzw, config(), max_pixels=20_000).shape == (32, 32, 3)
    assert preprocess(lzma, config(), max_pixels=40_000).shape == (32, 32, 3)
    with pytest.raises(ImageTooLarge, match="takes too long to decode"):
        preprocess(lzma, config(), max_pixels=20_000)


def test_the_photo_under_a_map_is_decoded_and_shrunk_under_control() -> None:
    data, region = encode(noise(120, 120), "PNG"), Region(0, 0, 120, 120)
    whole = Counter()
    upright_photo(data, region, 60, control=whole)
    assert whole.costs and whole.checks > len(data) // 4096
    for last in (1, 2, whole.checks - 1, whole.checks):
        with pytest.raises(Unwanted):
            upright_photo(data, region, 60, control=Counter(last))


def test_drawing_ends_between_its_steps() -> None:
    values = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    picture = np.asarray(noise(64, 64))

    def png(control: WorkControl) -> bytes:
        return encode_png(draw_heatmap(values, picture=picture, size=400, control=control), control)

    whole = Counter()
    drawn = png(whole)
    assert drawn == png(UNCONTROLLED)
    assert whole.checks > 2 + len(drawn) // 65_536
    for last in range(1, whole.checks + 1):
        ended = Counter(last)
        with pytest.raises(Unwanted):
            png(ended)
        assert ended.checks == last
