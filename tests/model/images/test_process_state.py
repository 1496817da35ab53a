"""Decoding neither changes nor depends on what belongs to the whole process: Pillow's settings, warnings, logging."""

from __future__ import annotations

import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from model.images.preprocess import preprocess
from tests.model.images.pictures import config, encode, scene, seen

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
    return {name: encode(image, name) for name in ("JPEG", "PNG", "BMP", "AVIF")}


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
