"""A picture is refused before it takes more pixels, memory or time than allowed."""

import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image

from model.errors import ImageTooLarge, InvalidImage, UnsupportedImageFormat
from model.images.preprocess import preprocess
from tests.model.images.pictures import (
    FORMATS,
    black_png,
    config,
    encode,
    insert_after_ihdr,
    insert_after_soi,
    jpeg_segment,
    noise,
    png_chunk,
    scene,
    seen,
)


@pytest.mark.parametrize("name", FORMATS)
def test_the_pixel_limit_is_exact(name):
    data = encode(Image.new("RGB", (64, 50)), name)

    assert preprocess(data, config(), max_pixels=64 * 50).shape == (32, 32, 3)
    with pytest.raises(ImageTooLarge, match=r"64 x 50"):
        preprocess(data, config(), max_pixels=64 * 50 - 1)


SIZES = {
    "JPEG": (lambda data: data.index(b"\xff\xc0") + 5, ">HH", 60_000),
    "GIF": (lambda _: 6, "<HH", 60_000),
    "BMP": (lambda _: 18, "<ii", 60_000),
    "WEBP": (lambda _: 26, "<HH", 16_383),
    "AVIF": (
        lambda data: data.index(b"ispe") + 8,
        ">II",
        16_000,
    ),  # libavif refuses larger sizes itself
}
"""Position and format of each header's width and height, and the largest value."""


def bomb(name: str) -> bytes:
    """Return a small file that claims 60,000 x 60,000 pixels, or the largest size of its format."""
    data = bytearray(encode(noise(64, 48), name))
    if name == "PNG":
        data[8:33] = png_chunk(b"IHDR", struct.pack(">II", 60_000, 60_000) + data[24:29])
    elif name == "TIFF":
        for tag in (256, 257):
            struct.pack_into("<L", data, data.index(struct.pack("<HHL", tag, 4, 1)) + 8, 60_000)
    else:
        place, form, side = SIZES[name]
        struct.pack_into(form, data, place(data), side, side)
    return bytes(data)


@pytest.mark.parametrize("name", FORMATS)
def test_size_is_refused_before_allocation(name):
    data = bomb(name)
    tracemalloc.start()
    start = time.thread_time()
    try:
        with pytest.raises(ImageTooLarge):
            preprocess(data, config())
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert time.thread_time() - start < 2


@pytest.mark.parametrize("place", ["canvas", "first frame", "second frame"])
def test_gif_size_includes_all_frames(place):
    data = bytearray(
        encode(noise(40, 30), "GIF", save_all=True, append_images=[noise(40, 30, seed=1)])
    )
    if place == "canvas":
        data[6:10] = struct.pack("<HH", 60_000, 60_000)
    else:
        frames = [
            at
            for at in range(len(data))
            if data[at : at + 9] == b",\0\0\0\0" + struct.pack("<HH", 40, 30)
        ]
        at = frames[0 if place == "first frame" else 1]
        data[at + 1 : at + 5] = b"\xff\xff\xff\xff"

    with pytest.raises(ImageTooLarge):
        preprocess(bytes(data), config())


def test_huge_side_is_refused():
    with pytest.raises(ImageTooLarge, match="side"):
        preprocess(black_png(2_000_000, 1), config())


@pytest.mark.timeout(60)
def test_limit_may_exceed_that_of_pillow():
    data = black_png(13_500, 13_500, bits=1)  # Pillow refuses above 178,956,970

    assert preprocess(data, config(), max_pixels=200_000_000).max() == 0


PEAK = """
import re, sys
from pathlib import Path
from model.config import PreprocessConfig
from model.images.preprocess import preprocess
data = sys.stdin.buffer.read()
config = PreprocessConfig(size=(224, 224), resize=sys.argv[1], resize_size=(224, 224),
                          interpolation="bicubic", mean=(0.5,) * 3, std=(0.5,) * 3)
preprocess(data, config)
# Not getrusage: its peak begins with that of the process that started this one.
print(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def peak_megabytes(data: bytes, resize: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", PEAK, resize], input=data, capture_output=True, check=True
    )
    return int(done.stdout) / 1e3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("colour_type", [2, 6], ids=["RGB", "RGBA"])
def test_the_largest_picture_fits_in_memory(colour_type):
    assert peak_megabytes(black_png(8000, 8000, colour_type=colour_type), "shortest_edge") < 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [(1_000_000, 4), (4, 1_000_000)], ids=["wide", "tall"])
def test_turned_sliver_takes_the_same_memory(size):
    exif = struct.pack("<2sHLHHHLHHL", b"II", 42, 8, 1, 274, 3, 1, 6, 0, 0)
    data = insert_after_ihdr(black_png(*size), png_chunk(b"eXIf", exif))

    # The other order of passes would need an intermediate picture of 224 MB.
    assert peak_megabytes(data, "squash") < 150


def overlapping_directory(entries: int, size: int) -> bytes:
    """Return an Exif block whose fields claim the same bytes.

    A reader that copies each field needs `entries` x `size` bytes.
    """
    fields = b"".join(struct.pack("<HHLL", 40_000 + tag, 7, size, 8) for tag in range(entries))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + fields + b"\0" * 4


GIF_FRAME = b"\x2c\0\0\0\0\x08\0\x08\0\0\2\2\x4c\1\0"


@pytest.mark.parametrize("place", ["JPEG", "PNG", "WEBP"])
def test_overlapping_exif_takes_no_memory(place):
    image = noise(64, 48)
    exif = overlapping_directory(5000, 60_000)
    with warnings.catch_warnings(action="ignore"):  # Pillow's AVIF writer reads it
        data = encode(image, place, exif=exif)

    tracemalloc.start()
    try:
        preprocess(data, config())
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert peak < 10_000_000


@pytest.mark.parametrize(
    "data",
    [
        insert_after_soi(encode(noise(8, 8), "JPEG"), jpeg_segment(0xFE, b"") * 1_000_000),
        insert_after_soi(encode(noise(8, 8), "JPEG"), jpeg_segment(0xE1, b"Exif\0\0") * 1_000_000),
        insert_after_soi(encode(noise(8, 8), "JPEG"), jpeg_segment(0xDB, b"") * 1_000_000),
        insert_after_ihdr(encode(noise(8, 8), "PNG"), png_chunk(b"teXt", b"") * 500_000),
        insert_after_ihdr(encode(noise(8, 8), "PNG"), png_chunk(b"IDAT", b"") * 500_000),
        encode(noise(8, 8), "GIF")[:-1] + GIF_FRAME * 1_000_000 + b";",
        encode(noise(8, 8), "GIF")[:-1] + b"!\xfe" + b"\1a" * 5_000_000 + b"\0;",
    ],
    ids=["comments", "exif", "tables", "texts", "pixels", "frames", "blocks"],
)
def test_many_parts_are_refused_soon(data):
    start = time.thread_time()

    with pytest.raises(InvalidImage, match="parts"):
        preprocess(data, config())

    assert time.thread_time() - start < 2  # otherwise it takes minutes


@pytest.mark.parametrize(
    "filler", [b"\xff" * 5_000_000, b"\xff\0" * 2_500_000], ids=["fill bytes", "rubbish"]
)
def test_bytes_between_segments_are_skipped(filler):
    image = noise(64, 48)
    plain = encode(image, "JPEG")
    start = time.thread_time()

    pixels = seen(insert_after_soi(plain, filler), image)

    assert time.thread_time() - start < 2  # otherwise it takes minutes
    assert np.array_equal(pixels, seen(plain, image))


def test_png_text_is_never_unpacked():
    image = noise(64, 48)
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9))
    profile = png_chunk(b"iCCP", b"a\0\0" + zlib.compress(b"x" * 50_000_000, 9))
    hidden = png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(b"0" * 50_000_000, 9))
    data = insert_after_ihdr(encode(image, "PNG"), text, profile, hidden)
    tracemalloc.start()
    try:
        assert np.array_equal(seen(data, image), np.asarray(image))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("orientation", [1, 6])
def test_bigtiff_is_read_like_tiff(orientation):
    wanted = config()
    small, big = (encode(scene(), "TIFF", orientation, big_tiff=big) for big in (False, True))

    assert big[2] == 43
    assert np.array_equal(preprocess(big, wanted), preprocess(small, wanted))


@pytest.mark.parametrize("frame", [0xC9, 0xCA])
def test_arithmetic_jpeg_is_refused(frame):
    # Its decoder reads zeros past the end of the data without end: 2 KB took 5 s.
    data = encode(noise(64, 48), "JPEG").replace(b"\xff\xc0", bytes([0xFF, frame]))

    with pytest.raises(UnsupportedImageFormat, match="arithmetic"):
        preprocess(data, config())


def test_a_wrong_png_checksum_is_refused():
    data = encode(noise(8, 8), "PNG")
    at = data.index(b"IEND") - 5

    with pytest.raises(InvalidImage, match="checksum"):
        preprocess(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], config())


def test_late_png_pixels_are_ignored():
    image = noise(8, 8)
    data = encode(image, "PNG")
    at = data.index(b"IDAT") - 4
    end = data.index(b"IEND") - 4
    body = data[at + 8 : end - 4]
    more = png_chunk(b"gAMA", bytes(4)) + png_chunk(b"IDAT", body[20:])

    with pytest.raises(InvalidImage):
        preprocess(data[:at] + png_chunk(b"IDAT", body[:20]) + more + data[end:], config())
    assert np.array_equal(seen(data[:end] + more + data[end:], image), np.asarray(image))
