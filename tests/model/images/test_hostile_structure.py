"""Files built to cost time or memory by their structure: parts, metadata, fields and scans without end."""

from __future__ import annotations

import struct
import time
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest

from model.errors import InvalidImage, UnsupportedImageFormat
from model.images.preprocess import preprocess
from tests.model.images.pictures import (
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


def overlapping_directory(entries: int, size: int) -> bytes:
    """An Exif block whose fields all claim the same bytes: `entries` x `size` if a reader copies each."""
    fields = b"".join(struct.pack("<HHLL", 40_000 + tag, 7, size, 8) for tag in range(entries))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", entries) + fields + b"\0" * 4


@pytest.mark.parametrize("place", ["JPEG", "PNG", "WEBP"])
def test_overlapping_exif_takes_no_memory(place):
    image = noise(64, 48)
    exif = overlapping_directory(5000, 60_000)
    with warnings.catch_warnings(action="ignore"):  # Pillow's AVIF writer looks into it
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
    ],
    ids=["comments", "exif", "tables", "texts", "pixels"],
)
def test_files_of_very_many_parts_are_refused_soon(data):
    start = time.thread_time()

    with pytest.raises(InvalidImage, match="parts"):
        preprocess(data, config())

    assert time.thread_time() - start < 2  # else it takes minutes


@pytest.mark.parametrize("filler", [b"\xff" * 5_000_000, b"\xff\0" * 2_500_000], ids=["fill bytes", "rubbish"])
def test_what_stands_between_the_segments_of_a_jpeg_is_skipped_soon(filler):
    image = noise(64, 48)
    plain = encode(image, "JPEG")
    start = time.thread_time()

    pixels = seen(insert_after_soi(plain, filler), image)

    assert time.thread_time() - start < 2  # else it takes minutes
    assert np.array_equal(pixels, seen(plain, image))


def test_compressed_text_of_a_png_is_never_unpacked():
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
def test_a_jpeg_with_arithmetic_coding_is_not_read(frame):
    # Its decoder reads zeros past the end of the data for ever: 2 KB took 5 s.
    data = encode(noise(64, 48), "JPEG").replace(b"\xff\xc0", bytes([0xFF, frame]))

    with pytest.raises(UnsupportedImageFormat, match="arithmetic"):
        preprocess(data, config())


def test_a_png_whose_pixels_have_a_wrong_checksum_is_refused_as_browsers_do():
    data = encode(noise(8, 8), "PNG")
    at = data.index(b"IEND") - 5

    with pytest.raises(InvalidImage, match="checksum"):
        preprocess(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], config())


def test_pixels_of_a_png_behind_another_chunk_do_not_count():
    image = noise(8, 8)
    data = encode(image, "PNG")
    at, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    body = data[at + 8 : end - 4]
    more = png_chunk(b"gAMA", bytes(4)) + png_chunk(b"IDAT", body[20:])

    with pytest.raises(InvalidImage):
        preprocess(data[:at] + png_chunk(b"IDAT", body[:20]) + more + data[end:], config())
    assert np.array_equal(seen(data[:end] + more + data[end:], image), np.asarray(image))
