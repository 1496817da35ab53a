"""The compiled kernel and Pillow give the same levels, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from model.images import resample
from model.images.decode import converter
from model.images.preprocess import preprocess
from model.images.resample import Axis, resample_part
from tests.model.images.pictures import config, encode, noise, scene

FILTERS = ("bilinear", "bicubic")

# Where it could be used it has to be: `resample` falls back to Pillow without a word.
compiled = pytest.mark.skipif(resample._load() is None, reason="no C compiler at installation, or no AVX2")


def part_of(resized: int, data: st.DataObject) -> tuple[int, int]:
    first = data.draw(st.integers(0, resized - 1))
    return first, data.draw(st.integers(1, resized - first))


@compiled
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 90), st.integers(1, 90),
       st.sampled_from(FILTERS), st.sampled_from(["RGB", "L"]), st.integers(0, 3), st.data())  # fmt: skip
def test_any_part_is_that_of_pillows_whole_picture(width, height, columns, rows, name, mode, mirrors, data):
    filter_ = Image.Resampling[name.upper()]
    stored = noise(width, height, 3 if mode == "RGB" else 1)
    upright = stored
    for flip, turn in ((1, Image.Transpose.FLIP_LEFT_RIGHT), (2, Image.Transpose.FLIP_TOP_BOTTOM)):
        upright = upright.transpose(turn) if mirrors & flip else upright
    low, top = (data.draw(st.floats(0, side / 2, width=32)) for side in stored.size)
    box = (low, top, *(data.draw(st.floats(side / 2 + 0.25, side, width=32)) for side in stored.size))
    (left, wide), (upper, high) = part_of(columns, data), part_of(rows, data)

    whole = np.asarray(upright.resize((columns, rows), filter_, box))
    pixels = resample_part(
        stored,
        Axis(box[0], box[2], columns, left, wide, bool(mirrors & 1)),
        Axis(box[1], box[3], rows, upper, high, bool(mirrors & 2)),
        filter_,
        rows_first=resample.passes_rows_first(stored.size, (columns, rows)),
    )

    assert pixels is not None
    assert np.array_equal(pixels, np.atleast_3d(whole)[upper : upper + high, left : left + wide])


@compiled
@pytest.mark.parametrize("size", [(341, 256), (42, 32), (500, 200), (900, 700)])
@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "I;16"])
def test_strips_and_converted_pieces_make_pillows_picture(size, rows_first, mode, monkeypatch):
    picture = noise(500, 375, 1)
    if mode == "I;16":
        picture = Image.fromarray(np.asarray(picture).astype(np.uint16) << 8)
    elif mode != "L":
        picture = noise(500, 375).quantize(64) if mode == "P" else noise(500, 375).convert(mode)
    convert = converter(picture, "RGB")
    # A pass along one axis has no order.
    middle = (500, size[1]) if rows_first else (size[0], 375)
    bicubic = Image.Resampling.BICUBIC
    whole = (convert(picture) if convert else picture).resize(middle, bicubic).resize(size, bicubic)
    columns, rows = Axis(0, 500, size[0], 0, size[0]), Axis(0, 375, size[1], 0, size[1])

    for strip in (4_000_000, 5_000, 1):
        monkeypatch.setattr(resample, "_STRIP_PIXELS", strip)
        pixels = resample_part(picture, columns, rows, bicubic, rows_first=rows_first, convert=convert)
        assert pixels is not None and pixels.tobytes() == whole.tobytes()


@compiled
def test_a_picture_in_several_pieces_of_memory_is_taken_in_strips():
    picture = Image.new("RGB", (3000, 2000))
    picture.paste(noise(700, 2000), (1900, 0))
    with pytest.raises(ValueError, match=r"contiguous|multiple"):
        picture.__arrow_c_array__()

    for rows_first in (True, False):
        pixels = resample_part(
            picture,
            Axis(0, 3000, 60, 20, 30),
            Axis(0, 2000, 40, 1, 39),
            Image.Resampling.BILINEAR,
            rows_first=rows_first,
        )
        middle = picture.resize((3000, 40) if rows_first else (60, 2000), Image.Resampling.BILINEAR)
        whole = np.asarray(middle.resize((60, 40), Image.Resampling.BILINEAR))
        assert pixels is not None and np.array_equal(pixels, whole[1:40, 20:50])


@pytest.mark.parametrize(
    ("axis", "filter_"),
    [(Axis(0, 96, 9, 0, 9), Image.Resampling.NEAREST), (Axis(0, 96, 90_000, 0, 90_000), Image.Resampling.BICUBIC)],
)
def test_what_the_kernel_does_not_make_is_left_to_pillow(axis, filter_):
    assert resample_part(scene(), axis, Axis(0, 64, 9, 0, 9), filter_, rows_first=False) is None


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_without_the_kernel_pillow_gives_nearly_the_same(orientation, mode, monkeypatch):
    data = encode(noise(150, 110).convert(mode), "TIFF", orientation)
    wanted = config((24, 40), (30, 50))
    pixels = preprocess(data, wanted)
    monkeypatch.setattr(resample, "_KERNEL", None)

    levels = np.abs(preprocess(data, wanted).astype(int) - pixels)

    assert levels.max() <= 1
