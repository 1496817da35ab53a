"""The orientation in XMP, or in a PNG's raw profile, turns a picture as Pillow would."""

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


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("is_compressed", [True, False])
def test_raw_exif_of_a_png_turns_it(is_compressed, orientation):
    exif = Image.Exif()
    exif[274] = orientation
    profile = exif.tobytes()
    digits = profile.hex()
    lines = [digits[start : start + 72] for start in range(0, len(digits), 72)]
    text = "\n".join(["", "exif", f"{len(profile):8}", *lines, ""])
    texts = PngImagePlugin.PngInfo()
    texts.add_text("Raw profile type exif", text, zip=is_compressed)
    data = encode(scene(), "PNG", pnginfo=texts)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert difference(seen(data, upright), np.asarray(upright)) <= 2


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (b"tEXt", b""),
        (b"tEXt", b"\n\n\nxyz"),
        (b"zTXt", b""),
        (b"zTXt", b"\0damaged"),
        (b"tEXt", b"\n\n\n\xff"),
    ],
)
def test_damaged_raw_exif_is_ignored(kind, body):
    chunk = png_chunk(kind, b"Raw profile type exif\0" + body)
    data = insert_after_ihdr(encode(scene(), "PNG"), chunk)
    assert decode(data, max_pixels=10**6).orientation == 1


def test_long_raw_exif_is_read_in_part():
    text = zlib.compress(b"\n\n\n" + b"49" * 15_000_000)
    chunk = png_chunk(b"zTXt", b"Raw profile type exif\0\0" + text)
    data = insert_after_ihdr(encode(scene(), "PNG"), chunk)
    assert decode(data, max_pixels=10**6).orientation == 1
