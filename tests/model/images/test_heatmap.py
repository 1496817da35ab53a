"""Maps as pictures: colours, position, size and caption; rows and sheets of several maps."""

import hashlib
import io
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image, ImageFont

from model.errors import InputError
from model.images.caption import caption_height, caption_of, drawable, fit_text
from model.images.heatmap import COLORMAPS, MAX_SIZE, Look, colour_table, draw_heatmap, encode_png
from model.images.preprocess import Region
from model.images.sheet import ContactSheet, draw_maps
from model.outputs import AttentionMap, MapRequest
from tests.model.images.pictures import difference, scene
from tests.needs import needs_methods

PICTURE = np.asarray(scene(96, 64))
TURBO_ENDS = colour_table("turbo")[[0, 255]].astype(int)
RAMP = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)


def drawn(values: npt.ArrayLike, picture: np.ndarray | None = None, **options) -> np.ndarray:
    region = options.pop("region", None)
    png = encode_png(
        draw_heatmap(
            np.asarray(values, dtype=np.float32), Look(**options), picture=picture, region=region
        )
    )
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG" and image.mode == "RGB"
    return np.asarray(image)


def test_no_colour_of_any_table_changes():
    tables = np.stack([colour_table(name) for name in COLORMAPS])

    assert (
        hashlib.sha256(tables.tobytes()).hexdigest().startswith("db8b959d8003613546c9c1839efbca1f")
    )


def test_highest_value_is_brightest():
    values = np.zeros((7, 10))
    values[2, 7] = 1

    pixels = drawn(values, colormap="gray", size=1000)[:, :, 0]

    assert pixels.shape == (700, 1000)
    rows, columns = np.nonzero(pixels > 250)
    assert rows.min() >= 200 and rows.max() < 300
    assert columns.min() >= 700 and columns.max() < 800


@given(st.floats(1e-30, 1e30))
@settings(max_examples=25, deadline=None)
def test_only_ratios_of_the_values_count(factor):
    assert difference(drawn(RAMP.astype(np.float64) * factor, size=64), drawn(RAMP, size=64)) <= 6


@pytest.mark.parametrize(
    ("times_even", "level"),
    [
        # 255 log(r) / log(max(4, largest r)) for r times the even share
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0]),
        ([0.0, 0.5, 1.5, 2.0], [0, 0, 75, 128]),
        ([4.0, 0.0, 0.0, 0.0], [255, 0, 0, 0]),
        ([8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], [255, 0, 0, 0, 0, 0, 0, 0]),
        ([5.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0], [255, 110, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_colour_shows_the_relative_share(times_even, level):
    pixels = drawn([times_even], colormap="gray", size=len(times_even), smooth=False)

    assert difference(pixels[0, :, 0], np.array(level)) <= 1


@pytest.mark.parametrize(
    "values", [np.zeros((3, 3)), np.full((3, 3), 7.5), np.full((3, 3), np.nan), np.ones((1, 1))]
)
@pytest.mark.parametrize("smooth", [True, False])
def test_an_even_map_changes_no_pixel(values, smooth):
    assert np.array_equal(
        np.unique(drawn(values, size=32).reshape(-1, 3), axis=0), colour_table("turbo")[:1]
    )
    assert np.array_equal(drawn(values, PICTURE, size=96, alpha=1.0, smooth=smooth), PICTURE)


def test_low_values_change_no_pixel():
    values = np.full((4, 6), 0.5)
    values[1, 1] = 20

    pixels = drawn(values, PICTURE, alpha=1.0, size=96)
    changed = (np.abs(pixels.astype(int) - PICTURE) > 6).any(axis=2)

    # The bright patch ends in the middle of its neighbours.
    assert changed[20:28, 20:28].all()
    changed[8:40, 8:40] = False
    assert not changed.any()


def test_invalid_values_count_as_zero():
    holes = RAMP.copy()
    holes[0, 0] = np.nan
    holes[0, 1] = np.inf
    holes[0, 2] = -np.inf
    holes[0, 3] = -3
    filled = RAMP.copy()
    filled[0] = 0

    assert np.array_equal(drawn(holes, size=64), drawn(filled, size=64))


def test_unsmoothed_patches_have_one_colour():
    values = np.random.default_rng(1).random((3, 5)) ** 3

    pixels = drawn(values, size=50, smooth=False).reshape(3, 10, 5, 10, 3)

    assert (pixels == pixels[:, :1, :, :1]).all()
    assert len(np.unique(pixels[:, 0, :, 0].reshape(-1, 3), axis=0)) > 5


def test_smoothing_keeps_middles_of_patches():
    values = np.random.default_rng(2).random((5, 5)) ** 2

    smooth = drawn(values, size=505, colormap="gray")[:, :, 0].astype(int)
    squares = drawn(values, size=505, colormap="gray", smooth=False)[:, :, 0].astype(int)

    assert difference(smooth[50::101, 50::101], squares[50::101, 50::101]) <= 1
    assert np.abs(np.diff(smooth, axis=0)).max() <= 9 and np.abs(np.diff(smooth, axis=1)).max() <= 9


@settings(max_examples=100, deadline=None)
@given(
    arrays.arrays(
        np.float32, st.tuples(st.integers(1, 20), st.integers(1, 20)), elements=st.floats(width=32)
    ),
    st.integers(1, 80),
)
def test_any_map_can_be_drawn(values, size):
    with np.errstate(all="raise", under="ignore"):
        assert max(drawn(values, size=size).shape[:2]) == size


def test_full_alpha_covers_the_highest_patch():
    values = [[8, 0, 4, 0], [0, 0, 0, 0]]

    black, white = (
        drawn(values, np.full((4, 8, 3), level, np.uint8), alpha=1.0, size=8, smooth=False).astype(
            int
        )
        for level in (0, 255)
    )

    # The visible share of the picture: 1 - log(r) / log(8) with r = 16 / 3, 0 and 8 / 3.
    through = (white - black)[0, :, 0] / 255
    expected = 1 - np.log([16 / 3, 1, 8 / 3, 1]) / np.log(16 / 3)
    assert np.abs(through[::2] - expected).max() < 0.01


def test_a_grey_picture_is_drawn_over():
    grey = PICTURE[:, :, :1]

    assert difference(drawn(RAMP, grey, alpha=0.0, size=96), np.repeat(grey, 3, axis=2)) == 0


def test_photo_outside_the_region_is_dimmed():
    photo = np.full((20, 40, 3), 200, np.uint8)

    pixels = drawn(
        [[1, 0], [0, 0]], photo, region=Region(20, 10, 10, 10), alpha=1.0, size=40, smooth=False
    )

    expected = np.full((20, 40, 3), 70, np.uint8)
    expected[10:20, 20:30] = 200
    expected[10:15, 20:25] = colour_table("turbo")[-1]
    assert np.array_equal(pixels, expected)


@pytest.mark.parametrize("smooth", [True, False])
def test_a_region_may_exceed_the_photo(smooth):
    photo = np.zeros((10, 40, 3), np.uint8)
    values = np.zeros((4, 4))
    values[1, 2] = 1
    values[0, 0] = 1

    pixels = drawn(values, photo, region=Region(0, -15, 40, 40), alpha=1.0, size=40, smooth=smooth)

    assert pixels.shape == (10, 40, 3)
    # Row 1 of the grid reaches from -5 to 5 and column 2 from 20 to 30, in pixels of the photo.
    assert pixels[0, 25].any() and pixels[9, 25].max() <= 4 and not pixels[:, :10].any()


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
def test_size_is_the_longer_side(picture, size, shape):
    pixels = drawn(
        np.ones((8, 16)), None if picture is None else np.zeros((*picture, 3), np.uint8), size=size
    )

    assert pixels.shape[:2] == shape


@pytest.mark.parametrize("name", ["rainbows", ""])
def test_a_bad_colormap_names_its_parameter(name):
    with pytest.raises(InputError, match="colormap") as error:
        Look(colormap=name)

    assert error.value.parameter == "colormap"


COLOURS = ["red", "lime", "blue", "yellow", "cyan"]


def picture(colour: str, size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.new("RGB", size, colour)


def places(image: Image.Image, colour: str) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = np.nonzero(
        (np.asarray(image) == np.asarray(picture(colour, (1, 1)))).all(axis=-1)
    )
    return rows, columns


def test_a_sheet_keeps_the_reading_order() -> None:
    sheet = ContactSheet(5, (60, 40))
    size = sheet.image.size
    for colour in COLOURS:
        sheet.add(picture(colour), "a file", "a label")
    pixels = np.asarray(sheet.image)
    assert sheet.image.size == size
    corners = []
    for colour in COLOURS:
        rows, columns = places(sheet.image, colour)
        assert (np.ptp(columns) + 1) / (np.ptp(rows) + 1) == pytest.approx(1.5, abs=0.02)
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1), (
            "nothing lies over the picture"
        )
        below = pixels[rows.max() + 1 : rows.max() + 40, columns.min() : columns.max()]
        assert (below < 128).any(), "a caption stands below it"
        corners.append((rows.min(), columns.min()))
    assert corners == sorted(corners)


@pytest.mark.parametrize("size", [(100, 200), (10, 1000), (2000, 20)])
def test_picture_of_another_shape_is_fitted(size: tuple[int, int]) -> None:
    sheet = ContactSheet(1, (60, 40))
    sheet.add(picture("red", size))
    rows, columns = places(sheet.image, "red")
    wanted = max(1, round(size[0] * min(480 / size[0], 320 / size[1])))
    assert int(np.ptp(columns)) + 1 == pytest.approx(wanted, abs=1)
    assert int(columns.min()) == pytest.approx(8 + (480 - wanted) // 2, abs=1)
    assert len(rows)


@pytest.mark.parametrize("shape", [(60, 40), (384, 384), (1600, 400)])
def test_a_full_sheet_has_8192_pixels(
    shape: tuple[int, int],
) -> None:
    assert 0.9 * 8192 < max(ContactSheet(2000, shape).image.size) <= 8192 + 8


def test_a_long_caption_is_cut_to_its_cell() -> None:
    sheet = ContactSheet(2, (60, 40))
    sheet.add(picture("red"), "W" * 500)
    red = places(sheet.image, "red")[1]
    inked = np.nonzero((np.asarray(sheet.image) < 64).all(axis=-1))[1]
    assert red.max() - 20 < inked.max() <= red.max()


SMALL = np.full((40, 40, 3), 90, np.uint8)
PEAK = np.array([[1, 0], [0, 0]], np.float32)


def of_class(evidence: float = 1.0, score: float = 0.6312, index: int = 0) -> AttentionMap:
    return AttentionMap(MapRequest("relevance", index), PEAK, 1.0, score, evidence)


@pytest.mark.parametrize(
    ("attention", "lines"),
    [
        (of_class(), ("tabby, tabby cat: 63.1%", "relevance, much evidence for it here (1.00)")),
        (
            of_class(0.0312, 0.00001),
            ("tabby, tabby cat: < 0.1%", "relevance, little evidence for it here (0.03)"),
        ),
        (
            of_class(0.19, index=1),
            ("uber alles...? (Kafer): 63.1%", "relevance, little evidence for it here (0.19)"),
        ),
        (of_class(0.2, index=2), ("class 2: 63.1%", "relevance, some evidence for it here (0.20)")),
        (
            AttentionMap(MapRequest.attention_row(3, "max"), PEAK, 1.0),
            ("attention of one layer", "cls, layer 3, head max"),
        ),
        pytest.param(
            AttentionMap(MapRequest("rollout"), PEAK, 1.0),
            ("attention through all layers", "rollout"),
            marks=needs_methods,
        ),
    ],
)
def test_caption_has_class_score_evidence(attention: AttentionMap, lines: tuple[str, str]) -> None:
    assert (
        caption_of(
            attention,
            ["tabby, tabby cat", "\u00fcber\nalles\u2026\u732b (K\u00e4fer)", "\u732b\u3001\u72ac"],
        )
        == lines
    )


@given(st.text(max_size=600))
def test_label_becomes_one_drawable_line(label: str) -> None:
    shown = drawable(label)
    assert shown.isascii()
    assert shown.isprintable()
    assert len(shown) <= 500
    font = ImageFont.load_default(12)
    assert font.getlength(fit_text(label, font, 80)) <= 80


def test_a_long_label_never_hides_its_score() -> None:
    font = ImageFont.load_default(12)
    labels = ["hippopotamus, hippo, river horse, Hippopotamus amphibius"]
    drawn, score = caption_of(of_class(), labels)[0].rsplit(": ", 1)
    shown = fit_text(drawn, font, 180, f": {score}")
    assert shown.startswith("hippopotamus, ")
    assert shown.endswith("...: 63.1%")
    assert font.getlength(shown) <= 180
    look: dict[str, Any] = {"picture": SMALL, "size": 240}
    scores = [
        np.asarray(draw_maps([of_class(score=score)], labels, **look)) for score in (0.6, 0.7)
    ]
    assert (scores[0] != scores[1]).any(), "the score is seen"


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 300)),
    st.integers(1, 600),
    st.text(max_size=30),
    st.booleans(),
)
def test_captioned_drawing_keeps_its_size(
    shape: tuple[int, int], size: int, label: str, overlay: bool
) -> None:
    picture = np.zeros((*shape, 3), np.uint8)
    look = {"size": size, "overlay": overlay}
    drawn = draw_maps([of_class()], [label], picture=picture, **look)  # type: ignore[arg-type]
    assert max(drawn.size) == size
    if size < 160:  # too narrow for a caption
        assert drawn.size == draw_maps([of_class()], None, picture=picture, **look).size  # type: ignore[arg-type]


def test_captioned_maps_stay_in_the_limit() -> None:
    tall = np.zeros((2048, 2048, 3), np.uint8)
    drawn = draw_maps([of_class()], ["a"], picture=tall)
    assert drawn.size == (MAX_SIZE - caption_height(MAX_SIZE), MAX_SIZE)
    row = draw_maps([of_class()] * 8, ["a"], picture=SMALL, max_width=MAX_SIZE)
    assert 2000 < row.width <= MAX_SIZE
    below = np.asarray(row)[-caption_height(252) :]
    inked = [(below[:, 256 * place : 256 * (place + 1)] < 90).any() for place in range(8)]
    assert all(inked), "each class has its own"
    row = draw_maps([of_class()] * 8, ["a"], picture=tall[:, :20], max_width=MAX_SIZE)
    assert row.width <= MAX_SIZE, "though a caption is wider than the share of its map"


def ink(image: Image.Image, top: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    pixels = np.asarray(image)[top:].astype(int)
    coloured: np.ndarray[Any, np.dtype[np.bool_]] = pixels.max(axis=2) - pixels.min(axis=2) > 60
    return coloured


def test_caption_explains_drawn_colours() -> None:
    for alpha, coloured in ((0.7, True), (0.0, False)):
        drawn = draw_heatmap(PEAK, Look(size=384, alpha=alpha), picture=SMALL, caption=("a", "b"))
        assert ink(drawn, drawn.height - caption_height(384)).any() == coloured
    assert ink(draw_heatmap(PEAK, Look(size=384), picture=SMALL), 0).any()
    words = [
        draw_heatmap(PEAK, Look(size=384), picture=SMALL, caption=(text, "")) for text in ("a", "b")
    ]
    assert words[0].tobytes() != words[1].tobytes()


def test_map_fades_with_its_evidence() -> None:
    look: dict[str, Any] = {
        "picture": np.zeros((64, 64, 3), np.uint8),
        "size": 64,
        "smooth": False,
        "colormap": "gray",
    }

    def brightest(maps: list[AttentionMap]) -> list[int]:
        row = np.asarray(draw_maps(maps, None, **look))
        return [int(row[:, 68 * place : 68 * place + 64].max()) for place in range(len(maps))]

    [whole] = brightest([of_class()])
    assert whole == pytest.approx(0.7 * 255, abs=3)
    for evidence in (0.5, 0.2, 0.05):
        [faded] = brightest([of_class(evidence)])
        assert faded == pytest.approx(evidence * 0.7 * 255, abs=4)
        assert brightest([of_class(evidence), of_class()]) == pytest.approx([faded, whole], abs=4)
        look["overlay"] = False
        assert brightest([of_class(evidence)]) == pytest.approx([255 * evidence], abs=1)
        del look["overlay"]
    assert brightest([of_class(0.0)]) == [0]
