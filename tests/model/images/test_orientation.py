"""Pictures come out upright, as Exif, XMP and the containers themselves say."""

from __future__ import annotations

import io
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from model.images.decode import decode
from model.images.preprocess import preprocess
from tests.model.images.pictures import (
    config,
    difference,
    encode,
    insert_after_ihdr,
    insert_after_soi,
    jpeg_segment,
    png_chunk,
    scene,
    seen,
)

XMP = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'


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


def test_xmp_turns_a_picture_without_exif():
    image = scene()
    packet = b"http://ns.adobe.com/xap/1.0/\0" + XMP
    in_jpeg = insert_after_soi(encode(image, "JPEG"), jpeg_segment(0xE1, packet))
    in_png = insert_after_ihdr(encode(image, "PNG"), png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP))
    in_webp = encode(image, "WEBP", xmp=XMP)
    in_tiff = encode(image, "TIFF", tiffinfo={700: XMP})

    for data in (in_jpeg, in_png, in_webp):
        assert decode(data, max_pixels=10**6).orientation == 6
    turned = decode(in_tiff, max_pixels=10**6)  # by Pillow
    assert (turned.size, turned.orientation) == (image.size[::-1], 1)


def test_exif_comes_before_xmp():
    data = insert_after_soi(
        encode(scene(), "JPEG", orientation=3), jpeg_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + XMP)
    )

    assert decode(data, max_pixels=10**6).orientation == 3


@pytest.mark.parametrize("packed", [True, False])
def test_exif_in_a_png_text_of_imagemagick_turns_the_picture(packed):
    exif = Image.Exif()
    exif[274] = 8
    body = exif.tobytes()
    text = b"\nexif\n%8d\n" % len(body) + body.hex().encode() + b"\n"
    name = b"Raw profile type exif\0"
    chunk = png_chunk(b"zTXt", name + b"\0" + zlib.compress(text)) if packed else png_chunk(b"tEXt", name + text)

    assert decode(insert_after_ihdr(encode(scene(), "PNG"), chunk), max_pixels=10**6).orientation == 8


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
