"""Decoding neither changes nor depends on what belongs to the whole process: Pillow's settings, warnings, logging."""

from __future__ import annotations

import struct
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from model.errors import ImageTooLarge, InvalidImage
from model.images.preprocess import preprocess
from tests.model.images.pictures import as_is, config, encode, noise, scene, seen

pytestmark = pytest.mark.timeout(60)  # processes start

IMPORT = """
import importlib, logging, pkgutil, warnings
import numpy
from PIL import AvifImagePlugin, GifImagePlugin, Image, ImageFile, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

SETTINGS = [
    (Image, "MAX_IMAGE_PIXELS"), (Image, "WARN_POSSIBLE_FORMATS"), (Image, "_decompression_bomb_check"),
    (ImageFile, "LOAD_TRUNCATED_IMAGES"), (ImageFile, "MAXBLOCK"), (ImageFile, "SAFEBLOCK"),
    (GifImagePlugin, "LOADING_STRATEGY"), (TiffImagePlugin, "READ_LIBTIFF"), (TiffImagePlugin, "warnings"),
    (PngImagePlugin, "MAX_TEXT_CHUNK"), (PngImagePlugin, "MAX_TEXT_MEMORY"),
    (AvifImagePlugin, "DECODE_CODEC_CHOICE"), (AvifImagePlugin, "DEFAULT_MAX_THREADS"),
]

def state():
    loggers = {name: (logger.level, logger.disabled, logger.handlers, logger.filters)
               for name in ("", "PIL", "PIL.Image", "PIL.TiffImagePlugin", "PIL.PngImagePlugin")
               for logger in [logging.getLogger(name)]}
    return ([(module.__name__, name, getattr(module, name, None)) for module, name in SETTINGS],
            list(warnings.filters), loggers, dict(Image.OPEN), numpy.geterr())

Image.init()
before = state()
import model.images
for module in pkgutil.walk_packages(model.images.__path__, "model.images."):
    if module.name != "model.images._resample":  # a library for ctypes, no module
        importlib.import_module(module.name)
after = state()
assert after == before, [pair for pair in zip(before, after) if pair[0] != pair[1]]
"""


def test_importing_changes_nothing_in_the_process():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr


@pytest.fixture
def low_pillow_limit(monkeypatch):
    """A process in which Pillow warns of more than 5,000 pixels and refuses more than 10,000."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5_000)


def large_files(image: Image.Image) -> dict[str, bytes]:
    files = {name: encode(image, name) for name in ("JPEG", "PNG", "BMP", "TIFF", "AVIF")}
    files["tiled TIFF"] = encode(image, "TIFF", compression="tiff_adobe_deflate")
    files["palette TIFF"] = encode(image.quantize(64), "TIFF", compression="tiff_lzw")
    files["GIF"] = encode(image, "GIF")
    # The first frame reaches beyond the canvas that the header states, and is to be disposed of.
    gif = bytearray(encode(image, "GIF", transparency=3, disposal=2))
    gif[6:10] = struct.pack("<HH", 4, 4)
    files["GIF with a small canvas"] = bytes(gif)
    return files


def test_the_limit_is_the_callers_and_not_pillows_in_many_threads(low_pillow_limit):
    image = scene(200, 100)  # four times as many pixels as Pillow would take
    files = large_files(image)

    def decoded(data: bytes) -> np.ndarray:
        return preprocess(data, config((16, 32), resize="squash"), max_pixels=200 * 100)

    with warnings.catch_warnings(action="error"):
        alone = [decoded(data) for data in files.values()]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(decoded, [*files.values()] * 8))

    assert Image.MAX_IMAGE_PIXELS == 5_000
    wanted = seen(encode(image.resize((32, 16), Image.Resampling.BICUBIC), "PNG"), Image.new("RGB", (32, 16)))
    for name, pixels in zip(files, alone, strict=True):
        assert np.abs(pixels.astype(int) - wanted).mean() < 12, name
    assert all(np.array_equal(pixels, alone[n % len(alone)]) for n, pixels in enumerate(together))


def test_a_webp_that_pillow_itself_refuses_is_too_large(low_pillow_limit):
    with pytest.raises(ImageTooLarge, match="larger than Pillow decodes"):
        preprocess(encode(scene(200, 100), "WEBP"), config())


def with_field(data: bytes, tag: int, count: int, value: int) -> bytes:
    """The TIFF file with another count and value or offset of one field of 16-bit numbers."""
    changed = bytearray(data)
    (start,) = struct.unpack_from("<L", data, 4)
    (fields,) = struct.unpack_from("<H", data, start)
    for entry in range(start + 2, start + 2 + 12 * fields, 12):
        if struct.unpack_from("<H", data, entry) == (tag,):
            struct.pack_into("<HLL", changed, entry + 2, 3, count, value)
    return bytes(changed)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_field_of_too_many_values_counts_with_its_first_and_without_a_warning(compression):
    image = scene()
    data = encode(image, "TIFF", compression=compression)
    two_values = with_field(data, 277, 2, 3)  # samples per pixel: 3 and 0
    far_values = with_field(data, 277, 3, len(data)) + struct.pack("<HHH", 3, 4, 5)

    with warnings.catch_warnings(action="error"):
        for each in (two_values, far_values):
            assert np.array_equal(seen(each, image), np.asarray(image))


def test_tiff_fields_outside_the_file_are_ignored_without_a_warning():
    image = scene()
    data = encode(image, "TIFF", tiffinfo={339: (1, 1, 1)})

    with warnings.catch_warnings(action="error"):
        assert np.array_equal(seen(with_field(data, 339, 3, len(data) - 2), image), np.asarray(image))  # sample format
        with pytest.raises(InvalidImage):
            preprocess(with_field(data, 258, 3, len(data) - 2), config())  # bits per sample


@pytest.mark.parametrize(
    "field",
    [
        struct.pack("<HHLL", 0x927C, 7, 5000, 4_000_000),  # far outside the file
        struct.pack("<HHLL", 274, 3, 2, 0x0006_0006),  # orientation, twice
        struct.pack("<HHLL", 0x927C, 7, 2**31, 8),
    ],
)
def test_what_is_wrong_with_the_exif_of_an_avif_costs_neither_the_picture_nor_a_warning(field):
    image = scene()
    harmless = struct.pack("<HHL4s", 271, 7, 4, b"name")
    data = encode(image, "AVIF", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0" + harmless + b"\0" * 4)
    assert harmless in data
    data, plain = data.replace(harmless, field), encode(image, "AVIF")

    with warnings.catch_warnings(action="error"):
        assert np.array_equal(seen(data, image), seen(plain, image))


def test_exif_in_an_avif_changes_no_pixel():
    image = noise(40, 30)
    plain = seen(encode(image, "AVIF"), image)
    exif = Image.Exif()
    exif[271] = "Exif infe"  # a maker whose name is that of the item and its box
    data = encode(image, "AVIF", exif=exif)

    assert np.array_equal(seen(data, image), plain)
    assert np.array_equal(preprocess(bytearray(data), as_is(image), scaled_decode=False), plain)
