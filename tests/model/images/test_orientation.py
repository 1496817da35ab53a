"""Pictures come out upright, as Exif, XMP and the containers themselves say."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageOps

from model.images.decode import decode
from model.images.preprocess import preprocess
from tests.model.images.pictures import (
    config,
    difference,
    encode,
    insert_after_soi,
    jpeg_segment,
    png_chunk,
    scene,
    seen,
)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
def test_pictures_come_out_upright(name, orientation):
    data = encode(scene(), name, orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")

    assert difference(seen(data, upright), np.asarray(upright)) <= 1
    # and not by chance: the same picture turned any other way looks different
    stored = scene()
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(encode(stored, "PNG", orientation))))
    assert difference(seen(data, upright), np.asarray(turned.convert("RGB"))) <= 40


def test_mpo_is_its_first_picture_upright():
    first, second = scene(), Image.new("RGB", (96, 64), "red")
    exif = Image.Exif()
    exif[274] = 6
    data = encode(first, "MPO", save_all=True, append_images=[second], exif=exif)

    pixels = preprocess(data, config((96, 64), resize="squash"), scaled_decode=False)

    assert Image.open(io.BytesIO(data)).format == "MPO"
    upright = np.asarray(first.transpose(Image.Transpose.ROTATE_270))
    assert difference(pixels, upright) <= 40


def test_exif_after_the_pixels_of_a_png_counts():
    exif = Image.Exif()
    exif[274] = 5
    data = encode(scene(), "PNG")
    end = data.index(b"IEND") - 4
    data = data[:end] + png_chunk(b"eXIf", exif.tobytes()[6:]) + data[end:]

    assert decode(data, max_pixels=10**6).orientation == 5


@pytest.mark.parametrize(
    "exif",
    [
        b"",
        b"Exif\0\0",
        b"Exif\0\0II*\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x09\0\0\0",  # orientation 9
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x01\0\0\0\x06\0\0\0",  # orientation as text
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\0\0\0\0\x06\0\0\0",  # no value at all
        b"\0" * 300,
    ],
)
def test_broken_exif_is_ignored(exif):
    image = scene()
    plain = encode(image, "JPEG")

    assert np.array_equal(seen(insert_after_soi(plain, jpeg_segment(0xE1, exif)), image), seen(plain, image))
