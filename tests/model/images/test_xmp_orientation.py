"""The orientation that only XMP states turns a picture as Pillow would."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, PngImagePlugin, features

from model.images.decode import decode
from tests.model.images.pictures import (
    difference,
    encode,
    insert_after_ihdr,
    png_chunk,
    scene,
    seen,
)

XMP_FORMS = {
    "attribute": b'<x><rdf:Description tiff:Orientation="%d"/></x>',
    "element": b"<x><tiff:Orientation>%d</tiff:Orientation></x>",
}


def with_xmp(image: Image.Image, name: str, xmp: bytes, exif: int | None = None) -> bytes:
    """Return a file with XMP, and with an Exif orientation if one is given."""
    if name != "PNG":
        return encode(image, name, exif, xmp=xmp)
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("XML:com.adobe.xmp", xmp.decode(), zip=b"attribute" in xmp)
    return encode(image, name, exif, pnginfo=texts)


@pytest.mark.parametrize("form", XMP_FORMS)
@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
def test_xmp_turns_a_picture_as_pillow_does(name, orientation, form):
    if name == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow lacks AVIF")
    data = with_xmp(scene(), name, XMP_FORMS[form] % orientation)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert difference(seen(data, upright), np.asarray(upright)) <= 2


@pytest.mark.parametrize("exif", [1, 3, 9])
@pytest.mark.parametrize("name", ["JPEG", "PNG", "WEBP"])
def test_exif_decides_before_xmp(name, exif):
    data = with_xmp(scene(), name, XMP_FORMS["attribute"] % 6, exif)
    expected = exif if exif < 9 else 1
    assert decode(data, max_pixels=10**6).orientation == expected


@pytest.mark.parametrize("is_compressed", [True, False])
def test_long_xmp_is_searched_in_part(is_compressed):
    xmp = b" " * 30_000_000 + XMP_FORMS["attribute"] % 6
    text = zlib.compress(xmp) if is_compressed else xmp
    chunk = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0%c\0\0\0" % is_compressed + text)
    data = insert_after_ihdr(encode(scene(), "PNG"), chunk)
    assert decode(data, max_pixels=10**6).orientation == 1


@pytest.mark.parametrize("body", [b"", b"\1", b"\1\0\0\0damaged", b"\0\0", b"\1\0en\0"])
def test_damaged_xmp_of_a_png_is_ignored(body):
    chunk = png_chunk(b"iTXt", b"XML:com.adobe.xmp\0" + body)
    data = insert_after_ihdr(encode(scene(), "PNG"), chunk)
    assert decode(data, max_pixels=10**6).orientation == 1
