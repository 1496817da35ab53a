"""Which part of the upright original the model saw."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from model.images.preprocess import model_input, upright_photo
from model.images.region import Region
from tests.model.images.pictures import config, difference, encode, scene


@pytest.mark.parametrize(
    ("size", "wanted", "region"),
    [
        # shortest_edge: 40 x 20 becomes 64 x 32, of which the middle 32 are cut: 16 / 1.6 = 10 from the left
        ((40, 20), config((32, 32)), (10, 0, 20, 20)),
        ((20, 40), config((32, 32)), (0, 10, 20, 20)),
        ((32, 32), config((32, 32)), (0, 0, 32, 32)),
        # 100 x 50 becomes 80 x 40; the middle 32 begin at 24 and 4 of these: times 1.25
        ((100, 50), config((32, 32), (40, 40)), (30, 5, 40, 40)),
        # 60 x 20 covers 32 x 48 as 96 x 32: columns 24...72 of 96, times 60 / 96
        ((60, 20), config((32, 48)), (15, 0, 30, 20)),
        # squash: all of it, whatever its shape; with a crop, 32 of 40 of either side
        ((100, 50), config((32, 32), resize="squash"), (0, 0, 100, 50)),
        ((100, 50), config((32, 32), (40, 40), resize="squash"), (10, 5, 80, 40)),
    ],
)
def test_the_region_is_what_is_left_after_resize_and_crop(size, wanted, region):
    picture = model_input(encode(Image.new("RGB", size), "PNG"), wanted)

    assert picture.region == pytest.approx(Region(*region))


def test_the_crop_begins_where_the_rounding_of_the_preprocessing_says():
    # 35 x 32: the margin of 3 is 1.5 on each side, which goes to the even 2 or down to 1
    data = encode(Image.new("RGB", (35, 32)), "PNG")
    even, down = (config((32, 32)).model_copy(update={"crop_rounding": name}) for name in ("half_even", "down"))

    assert (model_input(data, even).region.x, model_input(data, down).region.x) == (2, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_region_counts_in_pixels_of_the_upright_picture(orientation):
    data = encode(scene(60, 20), "PNG", orientation)

    region = model_input(data, config((16, 16))).region

    assert region == ((20, 0, 20, 20) if orientation < 5 else (0, 20, 20, 20))


def test_a_jpeg_decoded_at_a_smaller_scale_has_the_region_of_the_whole():
    data = encode(scene(1001, 667), "JPEG")
    scaled, full = (model_input(data, config((32, 32)), scaled_decode=scaled).region for scaled in (True, False))

    assert scaled == full
    assert full == pytest.approx((8 * 1001 / 48, 0, 32 * 1001 / 48, 667))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("resize", ["shortest_edge", "squash"])
def test_the_region_of_the_photo_shows_what_the_model_saw(orientation, resize):
    data = encode(scene(120, 60), "PNG", orientation)
    seen = model_input(data, config((30, 30), resize=resize))

    photo, region = upright_photo(data, seen.region)
    left, top, right, bottom = region.x, region.y, region.x + region.width, region.y + region.height
    part = Image.fromarray(photo).resize((30, 30), Image.Resampling.BICUBIC, (left, top, right, bottom))

    assert difference(np.asarray(part), seen.pixels) <= 2


@pytest.mark.parametrize(
    ("size", "longer", "expected"),
    [
        ((300, 200), 150, (150, 100)),
        ((300, 200), 3000, (300, 200)),
        ((300, 200), None, (300, 200)),
        ((2048, 4), None, (1024, 2)),
        ((500, 1), 50, (50, 1)),
        ((300, 200), 1, (1, 1)),
    ],
)
def test_a_photo_is_shrunk_and_never_enlarged(size, longer, expected):
    photo, region = upright_photo(encode(Image.new("RGB", size), "PNG"), Region(0, 0, *size), longer)

    assert photo.shape == (*expected[::-1], 3)
    assert region == pytest.approx((0, 0, *expected))


def test_a_large_jpeg_is_decoded_no_smaller_than_the_photo_is_drawn():
    data = encode(scene(1600, 800), "JPEG", quality=95)

    scaled, full = (upright_photo(data, Region(0, 0, 1600, 800), 300, scaled_decode=scaled) for scaled in (True, False))

    assert scaled[0].shape == full[0].shape == (150, 300, 3)
    assert scaled[1] == full[1]
    assert 0 < difference(scaled[0], full[0]) <= 6
