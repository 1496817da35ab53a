"""A TIFF's thumbnail never replaces its photo."""

import io
import struct
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, TiffImagePlugin

from model.errors import UnsupportedImageFormat
from model.images.decode import decode
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
