"""A map as a picture: its colours, its place over the picture, its size."""

from __future__ import annotations

import hashlib
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from model.errors import InputError
from model.images.colormaps import colour_table
from model.images.heatmap import COLORMAPS, MAX_SIZE, render_heatmap
from tests.model.images.pictures import difference, scene

PICTURE = np.asarray(scene(96, 64))
RAMP = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)


def drawn(values: np.ndarray, picture: np.ndarray | None = None, **options) -> np.ndarray:
    png = render_heatmap(np.asarray(values, dtype=np.float32), picture=picture, **options)
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG" and image.mode == "RGB"
    return np.asarray(image)


def test_the_names_of_matplotlib_are_on_offer():
    assert {"viridis", "inferno", "magma", "plasma", "turbo", "jet", "hot", "gray"} <= set(COLORMAPS)


@pytest.mark.parametrize(
    ("name", "lowest", "middle", "highest"),
    [
        # matplotlib.colormaps[name]([0, 128, 255], bytes=True)
        ("viridis", (68, 1, 84), (32, 144, 140), (253, 231, 36)),
        ("inferno", (0, 0, 3), (188, 55, 84), (252, 254, 164)),
        ("magma", (0, 0, 3), (183, 55, 121), (251, 252, 191)),
        ("plasma", (12, 7, 134), (204, 71, 120), (239, 248, 33)),
        ("jet", (0, 0, 127), (124, 255, 121), (127, 0, 0)),
        ("gray", (0, 0, 0), (128, 128, 128), (255, 255, 255)),
    ],
)
def test_colours_are_those_of_matplotlib(name, lowest, middle, highest):
    table = colour_table(name)

    assert difference(table[[0, 128, 255]], np.array([lowest, middle, highest])) <= 1


def test_no_colour_of_any_table_changes():
    tables = np.stack([colour_table(name) for name in COLORMAPS])

    assert hashlib.sha256(tables.tobytes()).hexdigest().startswith("db8b959d8003613546c9c1839efbca1f")


@pytest.mark.parametrize("name", COLORMAPS)
def test_every_table_has_256_colours_and_is_read_only(name):
    table = colour_table(name)

    assert table.shape == (256, 3) and table.dtype == np.uint8
    assert len(np.unique(table, axis=0)) > 120
    assert not table.flags.writeable


def test_the_highest_value_is_brightest_and_in_its_patch():
    values = np.zeros((7, 10))
    values[2, 7] = 1

    pixels = drawn(values, colormap="gray", size=1000)[:, :, 0]

    assert pixels.shape == (700, 1000)
    rows, columns = np.nonzero(pixels > 250)
    assert rows.min() >= 200 and rows.max() < 300
    assert columns.min() >= 700 and columns.max() < 800


@given(st.floats(1e-6, 1e6), st.floats(-1e3, 1e3))
@settings(max_examples=25, deadline=None)
def test_scale_and_offset_of_the_values_change_nothing(scale, offset):
    plain = drawn(RAMP, size=64)

    assert difference(drawn(RAMP.astype(np.float64) * scale + offset * scale, size=64), plain) <= 6


def test_the_map_reaches_both_ends_of_the_colours():
    pixels = drawn(RAMP, colormap="gray", size=256)

    assert pixels.min() == 0 and pixels.max() == 255


@pytest.mark.parametrize("values", [np.zeros((3, 3)), np.full((3, 3), 7.5), np.full((3, 3), np.nan), np.ones((1, 1))])
def test_a_constant_map_has_the_lowest_colour(values):
    assert np.array_equal(np.unique(drawn(values, size=32).reshape(-1, 3), axis=0), colour_table("inferno")[:1])


def test_values_that_are_not_finite_count_as_the_lowest():
    holes = RAMP.copy()
    holes[0, 0], holes[0, 1], holes[0, 2] = np.nan, np.inf, -np.inf
    filled = RAMP.copy()
    filled[0, :3] = RAMP[0, 3]

    assert np.array_equal(drawn(holes, size=64), drawn(filled, size=64))


@settings(max_examples=100, deadline=None)
@given(
    arrays.arrays(np.float32, st.tuples(st.integers(1, 20), st.integers(1, 20)), elements=st.floats(width=32)),
    st.integers(1, 80),
)
def test_any_map_can_be_drawn(values, size):
    with np.errstate(all="raise", under="ignore"):
        assert max(drawn(values, size=size).shape[:2]) == size


def test_without_alpha_the_picture_is_left_alone():
    assert np.array_equal(drawn(RAMP, PICTURE, alpha=0.0, size=96), PICTURE)


def test_with_full_alpha_the_picture_is_covered():
    covered = drawn(RAMP, PICTURE, alpha=1.0, size=96)

    assert np.array_equal(covered, drawn(RAMP, 255 - PICTURE, alpha=1.0, size=96))


def test_alpha_blends_evenly():
    half = drawn(RAMP, PICTURE, alpha=0.5, size=96).astype(int)
    ends = drawn(RAMP, PICTURE, alpha=0.0, size=96).astype(int) + drawn(RAMP, PICTURE, alpha=1.0, size=96)

    assert difference(2 * half, ends) <= 2


def test_a_grey_picture_is_drawn_over():
    grey = PICTURE[:, :, :1]

    assert difference(drawn(RAMP, grey, alpha=0.0, size=96), np.repeat(grey, 3, axis=2)) == 0


@pytest.mark.parametrize(
    ("picture", "size", "shape"),
    [
        ((224, 224), None, (384, 384)),
        ((32, 32), None, (384, 384)),
        ((512, 384), None, (512, 384)),
        ((100, 200), None, (192, 384)),
        ((100, 200), 1000, (500, 1000)),
        ((200, 100), 50, (50, 25)),
        ((3000, 1000), None, (2048, 683)),
        ((1, 500), 2048, (4, 2048)),
        ((1, 500), 100, (1, 100)),
        (None, None, (192, 384)),
        (None, 64, (32, 64)),
    ],
)
def test_size_is_the_longer_side_and_the_pictures_shape_stays(picture, size, shape):
    pixels = drawn(np.ones((8, 16)), None if picture is None else np.zeros((*picture, 3), np.uint8), size=size)

    assert pixels.shape[:2] == shape


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("colormap", "rainbows"),
        ("colormap", ""),
        ("alpha", -0.1),
        ("alpha", 1.1),
        ("alpha", float("nan")),
        ("size", 0),
        ("size", -5),
        ("size", MAX_SIZE + 1),
    ],
)
def test_a_parameter_outside_what_is_offered_names_itself(parameter, value):
    with pytest.raises(InputError, match=parameter) as error:
        render_heatmap(RAMP, picture=None, **{parameter: value})

    assert error.value.parameter == parameter


def test_an_unknown_colormap_is_told_the_known_ones():
    with pytest.raises(InputError, match="viridis"):
        render_heatmap(RAMP, picture=None, colormap="rainbows")
