"""Any bytes give a picture or an `ImageError` of one line, in bounded time."""

import functools
import struct
import time
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from model.errors import ImageError
from model.images.preprocess import preprocess
from tests.model.images.pictures import config, encode, noise, scene

MAGICS = [
    b"\xff\xd8\xff",
    b"\xff\xd8\xff\xe1\0\x20Exif\0\0II*\0",
    b"\x89PNG\r\n\x1a\n",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
    b"RIFF\x40\0\0\0WEBPVP8 ",
    b"RIFF\x40\0\0\0WEBPVP8X",
    b"RIFF\x40\0\0\0WEBPVP8L",
    b"GIF89a\x10\0\x10\0\x80\0\0",
    b"BM\0\0\0\0\0\0\0\0\x36\0\0\0\x28\0\0\0",
    b"II*\0\x08\0\0\0",
    b"MM\0*\0\0\0\x08",
    b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0",
    b"\0\0\0\x18ftypavif\0\0\0\0mif1avif",
    b"\0\0\0\x18ftypheic\0\0\0\0mif1heic",
]


@functools.cache
def valid_files() -> list[bytes]:
    picture = noise(40, 30)
    grey = noise(40, 30, channels=1)
    animation: dict[str, Any] = {"save_all": True, "append_images": [scene(40, 30)]}
    return [
        encode(picture, "JPEG", orientation=6),
        encode(picture, "JPEG", progressive=True, subsampling=0),
        encode(picture.convert("CMYK"), "JPEG"),
        encode(picture, "MPO", **animation),
        encode(picture, "PNG", orientation=3),
        encode(picture.quantize(16), "PNG", transparency=3),
        encode(Image.fromarray(np.asarray(grey).astype(np.uint16) * 257), "PNG"),
        encode(picture, "PNG", **animation),
        encode(picture, "WEBP", orientation=8),
        encode(picture.convert("RGBA"), "WEBP", lossless=True),
        encode(picture, "WEBP", **animation),
        encode(picture, "GIF", **animation),
        encode(grey, "GIF", interlace=1),
        encode(picture, "BMP"),
        encode(picture.quantize(16), "BMP"),
        encode(picture, "TIFF", orientation=5),
        encode(picture, "TIFF", big_tiff=True),
        encode(picture, "AVIF", orientation=6),
        *(
            encode(picture, "TIFF", compression=name)
            for name in ("tiff_lzw", "jpeg", "tiff_adobe_deflate", "packbits")
        ),
        encode(grey.convert("1"), "TIFF", compression="group4"),
        encode(grey.convert("F"), "TIFF"),
        encode(picture.convert("LAB"), "TIFF"),
    ]


def answer(data: bytes, *, scaled_decode: bool = True) -> None:
    start = time.thread_time()
    with warnings.catch_warnings(action="ignore"):
        try:
            pixels = preprocess(data, config((16, 24), (20, 28)), scaled_decode=scaled_decode)
        except ImageError as error:
            message = str(error)
            assert message
            assert "\n" not in message
            assert len(message) < 300
        else:
            assert pixels.shape == (16, 24, 3)
    assert time.thread_time() - start < 2


def with_checksums(data: bytearray) -> bytes:
    """Return a PNG whose chunks have valid checksums; otherwise few faults reach the decoder."""
    fixed = bytearray(data)
    place = 8
    while place + 12 <= len(fixed):
        end = place + 8 + int.from_bytes(fixed[place : place + 4], "big")
        if end + 4 > len(fixed):
            break
        struct.pack_into(">I", fixed, end, zlib.crc32(fixed[place + 4 : end]))
        place = end + 4
    return bytes(fixed)


@given(st.sampled_from(MAGICS), st.binary(max_size=400))
def test_anything_after_a_magic_is_answered(magic: bytes, rest: bytes) -> None:
    answer(magic + rest)


@given(st.binary(max_size=64))
def test_any_bytes_are_answered(data: bytes) -> None:
    answer(data)


@given(st.data(), st.integers(0, 24), st.booleans())
def test_damaged_files_are_answered(draw: st.DataObject, number: int, scaled_decode: bool) -> None:
    data = bytearray(valid_files()[number])
    # Most relevant fields are in the first few hundred bytes.
    places = st.integers(0, len(data) - 1) | st.integers(0, min(len(data) - 1, 300))
    for place in draw.draw(st.lists(places, min_size=1, max_size=6), label="places"):
        kind = draw.draw(
            st.sampled_from(("set", "set", "number", "insert", "delete", "repeat", "cut")),
            label="kind",
        )
        if kind == "set":
            data[place : place + 1] = draw.draw(st.binary(min_size=1, max_size=1))
        elif kind == "number":
            value = draw.draw(
                st.sampled_from((0, 1, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF))
            )
            data[place : place + 4] = value.to_bytes(
                4, draw.draw(st.sampled_from(("big", "little")))
            )
        elif kind == "insert":
            data[place:place] = draw.draw(st.binary(max_size=12))
        elif kind == "delete":
            del data[place : place + draw.draw(st.integers(1, 12))]
        elif kind == "repeat":
            data[place:place] = data[place : place + 40] * 3
        else:
            del data[place:]
    answer(
        with_checksums(data) if data.startswith(b"\x89PNG") else bytes(data),
        scaled_decode=scaled_decode,
    )


@given(st.data(), st.integers(0, 24), st.integers(0, 24))
def test_spliced_files_are_answered(draw: st.DataObject, one: int, other: int) -> None:
    head = valid_files()[one]
    tail = valid_files()[other]
    answer(
        head[: draw.draw(st.integers(0, len(head)))] + tail[draw.draw(st.integers(0, len(tail))) :]
    )


@pytest.mark.parametrize("magic", MAGICS)
def test_a_magic_alone_is_answered(magic: bytes) -> None:
    for length in range(len(magic) + 1):
        answer(magic[:length])


def test_files_to_damage_are_valid_first() -> None:
    assert len(valid_files()) == 25
    for data in valid_files():
        assert preprocess(data, config()).shape == (32, 32, 3)
