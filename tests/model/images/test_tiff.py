"""A TIFF's thumbnail never replaces its photo, and its samples have the range that they state."""

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, TiffImagePlugin

from model.errors import UnsupportedImageFormat
from model.images.decode import converter, decode
from model.images.formats import is_thumbnail


def tiff(**tags: int) -> bytes:
    """A picture of 40 x 30 pixels with more tags in its first directory."""
    names = {
        "new_subfile_type": 254,
        "subfile_type": 255,
        "cfa_pattern": 33421,
        "dng_version": 50706,
    }
    directory = TiffImagePlugin.ImageFileDirectory_v2()
    for name, value in tags.items():
        directory[names[name]] = value
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "TIFF", tiffinfo=directory)
    return file.getvalue()


def with_photometric(value: int) -> bytes:
    data = bytearray(tiff())
    start = struct.unpack_from("<L", data, 4)[0]
    count = struct.unpack_from("<H", data, start)[0]
    for place in range(start + 2, start + 2 + 12 * count, 12):
        if struct.unpack_from("<H", data, place)[0] == 262:
            struct.pack_into("<H", data, place + 8, value)
    return bytes(data)


RAWS: dict[str, bytes] = {
    "reduced": tiff(new_subfile_type=1),
    "a reduced page": tiff(new_subfile_type=3),
    "reduced, in old files": tiff(subfile_type=2),
    "DNG": tiff(dng_version=1),
    "colour filter array": tiff(cfa_pattern=2),
    "values of a sensor": with_photometric(32803),
    "linear raw": with_photometric(34892),
    "CR2": b"II*\0\x10\0\0\0CR\x02\0" + bytes(100),
    "CR3": b"\0\0\0\x18ftypcrx \0\0\0\x01" + bytes(100),
    "RAF": b"FUJIFILMCCD-RAW 0201" + bytes(100),
    "ORF": b"IIRO\x08\0\0\0" + bytes(100),
    "RW2": b"IIU\0\x18\0\0\0" + bytes(100),
    "X3F": b"FOVb" + bytes(100),
}


@pytest.mark.parametrize("data", RAWS.values(), ids=RAWS)
def test_a_raw_photo_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(UnsupportedImageFormat, match="raw photos are not decoded"):
        decode(data, max_pixels=1_000_000)


@pytest.mark.parametrize("options", [{}, {"big_tiff": True}, {"compression": "tiff_lzw"}])
@pytest.mark.parametrize(
    "tags", [{}, {"new_subfile_type": 0}, {"new_subfile_type": 2}, {"subfile_type": 1}]
)
def test_other_tiffs_are_decoded(options: dict[str, Any], tags: dict[str, int]) -> None:
    file = io.BytesIO()
    Image.open(io.BytesIO(tiff(**tags))).save(file, "TIFF", **options)
    assert decode(file.getvalue(), max_pixels=1_000_000).size == (40, 30)
    assert decode(tiff(**tags), max_pixels=1_000_000).size == (40, 30)


def test_a_damaged_directory_is_no_thumbnail() -> None:
    whole = tiff(new_subfile_type=1)
    assert is_thumbnail(whole)
    for length in range(len(whole)):
        assert is_thumbnail(whole[:length]) in (True, False)
    assert not is_thumbnail(b"II*\0\xff\xff\xff\xff")


@pytest.mark.shared
def test_a_raw_thumbnail_is_refused(shared: Path) -> None:
    with pytest.raises(UnsupportedImageFormat, match="export the photo as JPEG"):
        decode((shared / "data/field/thumbnail.dng").read_bytes(), max_pixels=64_000_000)


def samples(values: NDArray[Any], bits: int, photometric: int = 1, **tags: int) -> bytes:
    """A little-endian TIFF of one row of samples, [pixels] or [pixels, 3]."""
    data = values.tobytes()
    channels = 1 if values.ndim == 1 else values.shape[1]
    numbers = {"highest": 281, "sample_format": 339}
    entries = {
        256: len(values), 257: 1, 258: bits, 259: 1, 262: photometric, 273: 8, 277: channels,
        278: 1, 279: len(data), **{numbers[name]: value for name, value in tags.items()},
    }  # fmt: skip
    head = struct.pack("<2sHL", b"II", 42, 8 + len(data)) + data
    directory = [struct.pack("<HHLHH", tag, 3, 1, entries[tag], 0) for tag in sorted(entries)]
    return head + struct.pack("<H", len(entries)) + b"".join(directory) + bytes(4)


def levels(data: bytes) -> list[int]:
    """The levels of a grey picture's row after its conversion."""
    image = decode(data, max_pixels=1_000).image
    convert = converter(image, "L")
    assert convert is not None
    return list(convert(image).tobytes())


GREY = np.array([0, 64, 128, 255])


@pytest.mark.parametrize(
    "data",
    [
        samples((GREY * 257).astype("<u2"), 16),
        samples((GREY * 257).astype("<u2"), 16, highest=40_000),
        samples((GREY * 16).astype("<u2"), 16, highest=4095),
        samples((GREY * 64).astype("<u2"), 16, highest=16_000),
        samples((GREY * 128).astype("<i2"), 16, sample_format=2),
        samples((GREY * 16843009).astype("<u4"), 32, sample_format=1),
        samples((GREY * 8421504).astype("<i4"), 32, sample_format=2),
        samples((GREY / 255).astype("<f4"), 32, sample_format=3),
    ],
)
def test_samples_are_scaled_by_their_bits(data: bytes) -> None:
    np.testing.assert_allclose(levels(data), GREY, atol=1)


def test_twelve_bits_are_scaled_to_eight() -> None:
    packed = np.array([0x00, 0x04, 0x00, 0x80, 0x0F, 0xFF], np.uint8)
    data = bytearray(samples(packed, 12))
    width = data.index(struct.pack("<HHLHH", 256, 3, 1, len(packed), 0))
    struct.pack_into("<H", data, width + 8, len(GREY))
    assert levels(bytes(data)) == [0, 64, 128, 255]


@pytest.mark.parametrize(
    "data",
    [
        samples((GREY * 257).astype("<u2"), 16, photometric=0),
        samples((GREY / 255).astype("<f4"), 32, photometric=0, sample_format=3),
        samples(np.stack([GREY / 255] * 3, axis=1).astype("<f4"), 32, 2, sample_format=3),
        samples(GREY.astype("<f8"), 64, sample_format=3),
    ],
)
def test_tiff_of_other_samples_has_a_remedy(data: bytes) -> None:
    with pytest.raises(UnsupportedImageFormat, match="convert it to 8 bits per sample, or to PNG"):
        decode(data, max_pixels=1_000)


def test_dark_colour_of_few_bits_is_refused() -> None:
    colours = np.stack([GREY * 16] * 3, axis=1).astype("<u2")
    data = samples(colours, 16, 2, highest=4095)
    with pytest.raises(UnsupportedImageFormat, match="convert it to 8 bits per sample"):
        decode(data, max_pixels=1_000)
