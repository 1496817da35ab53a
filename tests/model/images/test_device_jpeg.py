"""Which pictures go to the device: never one that the CPU's way would refuse."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.config import PreprocessConfig
from model.images import device_jpeg
from model.images.decode import decode
from model.images.device_jpeg import device_picture
from model.images.preprocess import model_input

CONFIG = PreprocessConfig(
    size=(16, 16),
    resize="shortest_edge",
    resize_size=(20, 20),
    interpolation="bicubic",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    return Image.fromarray(noise).convert(mode)


def jpeg(mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    file = io.BytesIO()
    picture(mode, size).save(file, "JPEG", **options)
    return file.getvalue()


def taken(data: bytes, max_pixels: int = 64_000_000) -> bool:
    return device_picture(data, CONFIG, max_pixels=max_pixels) is not None


def with_orientation(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    return jpeg(exif=exif)


def replaced(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) == 1
    return data.replace(old, new)


FRAME = b"\xff\xc0\x00\x11\x08"


@pytest.mark.parametrize(
    "data",
    [
        *(jpeg(subsampling=subsampling) for subsampling in ("4:4:4", "4:2:2", "4:2:0")),
        jpeg("L"),
        jpeg(optimize=True),
        jpeg(restart_marker_blocks=2),
        jpeg(comment=b"c" * 1000, icc_profile=b"p" * 100_000),
        with_orientation(6),
        jpeg() + b"rubbish behind the picture",
    ],
    ids=["4:4:4", "4:2:2", "4:2:0", "grey", "own tables", "restarts", "metadata", "turned", "trailing bytes"],
)
def test_a_plain_baseline_picture_goes_to_the_device_without_its_metadata(data: bytes) -> None:
    found = device_picture(data, CONFIG, max_pixels=64_000_000)
    assert found is not None
    whole, small = (np.asarray(Image.open(io.BytesIO(file))) for file in (data, found.encoded.data))
    np.testing.assert_array_equal(whole, small)
    assert len(found.encoded.data) < 10_000
    assert found.encoded.data.endswith(b"\xff\xd9")


TABLE = b"\xff\xc4\x00\x14\x00\x01" + bytes(15) + b"\x05"
"""One Huffman table, of one symbol."""

PNG = io.BytesIO()
picture().save(PNG, "PNG")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PNG.getvalue(),
        jpeg(progressive=True),
        jpeg("CMYK"),
        jpeg(keep_rgb=True),
        jpeg()[:-2],
        jpeg()[:-200],
        jpeg()[:300],
        replaced(jpeg(), FRAME, b"\xff\xc1\x00\x11\x08"),
        replaced(jpeg(), FRAME, b"\xff\xc0\x00\x11\x0c"),
        replaced(jpeg(), FRAME + b"\x00\x1e", FRAME + b"\x00\x00"),
        replaced(jpeg(subsampling="4:4:4"), b"\x01\x11\x00\x02\x11\x01", b"\x01\x41\x00\x02\x11\x01"),
        replaced(jpeg(subsampling="4:4:4"), b"\x01\x11\x00\x02\x11\x01", b"\x01\x11\x03\x02\x11\x01"),
        replaced(jpeg(optimize=True), b"\xff\xda\x00\x0c\x03\x01\x00", b"\xff\xda\x00\x0c\x03\x01\x22"),
        jpeg(size=(2000, 2)),
        TABLE.join([jpeg()[:2], jpeg()[2:]]),
        jpeg()[:2] + (TABLE * 5_000) + jpeg()[2:],
        jpeg()[:2] + b"\xff\xe0\x00\x07JFIF\x00" + jpeg()[2:],
        replaced(jpeg(subsampling="4:2:0"), FRAME + b"\x00\x1e\x00\x28", FRAME + b"\x0f\xa0\x0f\xa0"),
        replaced(jpeg(restart_marker_blocks=2), b"\xff\xd1", b"\xff\xd2"),
        replaced(jpeg(restart_marker_blocks=2), b"\xff\xd1", b""),
        replaced(jpeg(restart_marker_blocks=2), b"\xff\xdd\x00\x04\x00\x02", b""),
    ],
    ids=[
        "empty",
        "PNG",
        "progressive",
        "CMYK",
        "RGB",
        "no end",
        "cut off",
        "cut off in the tables",
        "extended",
        "12 bits",
        "height in a later segment",
        "other sampling",
        "no quantisation table",
        "no Huffman table",
        "a strip that would be enlarged",
        "a table twice",
        "very many tables",
        "a short JFIF segment",
        "too few data for its size",
        "restarts out of order",
        "a restart less",
        "restarts that are not announced",
    ],
)
def test_whatever_is_in_doubt_is_left_to_the_cpu(data: bytes) -> None:
    assert not taken(data)


def test_limits_hold_for_bytes_and_for_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    data = jpeg()
    assert taken(data, max_pixels=40 * 30)
    assert not taken(data, max_pixels=40 * 30 - 1)
    monkeypatch.setattr(device_jpeg, "MAX_PIXELS", 40 * 30 - 1)
    assert not taken(data)
    monkeypatch.undo()
    stripped = device_picture(data, CONFIG, max_pixels=64_000_000)
    assert stripped is not None
    monkeypatch.setattr(device_jpeg, "MAX_BYTES", len(stripped.encoded.data))
    assert taken(data)
    monkeypatch.setattr(device_jpeg, "MAX_BYTES", len(stripped.encoded.data) - 1)
    assert not taken(data)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_size_orientation_and_region_are_those_of_the_cpus_way(orientation: int) -> None:
    data = with_orientation(orientation)
    found = device_picture(data, CONFIG, max_pixels=64_000_000)
    assert found is not None
    assert (found.encoded.size, found.encoded.orientation) == ((40, 30), orientation)
    assert found.region == model_input(data, CONFIG).region


@pytest.mark.parametrize(
    "data", [jpeg(), jpeg(optimize=True, restart_marker_blocks=3), jpeg("L")], ids=["usual", "own tables", "grey"]
)
def test_no_damaged_file_goes_to_the_device_that_the_cpu_would_refuse(data: bytes) -> None:
    chance = random.Random(7)
    accepted = 0
    for _ in range(600):
        damaged = bytearray(data)
        # Most damage to the head, where fatal errors come from.
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(min(len(data), chance.choice((640, 640, len(data)))))] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
            damaged += b"\xff\xd9"
        if taken(bytes(damaged)):
            decode(bytes(damaged), max_pixels=64_000_000)
            accepted += 1
    assert accepted > 20, "the test would say nothing"
