"""Rows of drawings and contact sheets."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from model.images import sheet as sheet_module
from model.images.legend import fit_text
from model.images.sheet import ContactSheet, in_a_row

MAX_SIZE = 2048
COLOURS = ["red", "lime", "blue", "yellow", "cyan"]


def picture(colour: str, size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.new("RGB", size, colour)


def count(image: Image.Image, colour: str) -> int:
    return int((np.asarray(image) == np.asarray(picture(colour, (1, 1)))).all(axis=-1).sum())


def test_pictures_stand_side_by_side_whole() -> None:
    row = in_a_row([picture("red"), picture("lime", (30, 90))], 2)
    assert row.height == 90
    assert [count(row, colour) for colour in COLOURS[:2]] == [60 * 40, 30 * 90]
    alone = picture("red")
    assert in_a_row([alone], 1) is alone
    for max_width in (alone.width, alone.width - 1):
        assert in_a_row([alone], 1, max_width=max_width) is alone


def test_pictures_stand_in_order_with_white_between() -> None:
    row = np.asarray(in_a_row((picture(colour, (10, 6)) for colour in COLOURS[:3]), 3, max_width=MAX_SIZE))
    assert row.shape == (6, 38, 3)
    for place, colour in enumerate(COLOURS[:3]):
        assert (row[:, 14 * place : 14 * place + 10] == np.asarray(picture(colour, (1, 1)))).all()
    assert (row[:, 10:14] == 255).all()


@pytest.mark.parametrize("number", [2, 8])
def test_a_row_is_never_wider_than_it_may_be(number: int) -> None:
    row = in_a_row([picture("red", (2048, 1024))] * number, number, max_width=MAX_SIZE)
    assert MAX_SIZE - number < row.width <= MAX_SIZE
    assert row.height == pytest.approx(row.width / number / 2, abs=2)


def test_a_sheet_shows_every_picture_in_reading_order_with_its_caption() -> None:
    sheet = ContactSheet(5, (60, 40))
    blank = np.asarray(sheet.image).copy()
    for colour in COLOURS:
        sheet.add(picture(colour), "a file", "a label")
    pixels = np.asarray(sheet.image)
    assert pixels.shape == blank.shape
    places = []
    for colour in COLOURS:
        rows, columns = np.nonzero((pixels == np.asarray(picture(colour, (1, 1)))).all(axis=-1))
        assert (np.ptp(columns) + 1) / (np.ptp(rows) + 1) == pytest.approx(1.5, abs=0.02)
        assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1), "nothing lies over the picture"
        below = pixels[rows.max() + 1 : rows.max() + 40, columns.min() : columns.max()]
        assert (below < 128).any(), "a caption stands below it"
        places.append((rows.min(), columns.min()))
    assert places == sorted(places)
    with pytest.raises(ValueError, match="room for 5"):
        sheet.add(picture("red"))


def test_a_picture_of_another_shape_is_fitted_and_not_stretched() -> None:
    sheet = ContactSheet(1, (60, 40))
    sheet.add(picture("red", (100, 200)))
    rows, columns = np.nonzero((np.asarray(sheet.image) == (255, 0, 0)).all(axis=-1))
    assert (np.ptp(rows) + 1) / (np.ptp(columns) + 1) == pytest.approx(2, abs=0.02)


@pytest.mark.parametrize(("size", "shown"), [((1, 1000), (1, 320)), ((2000, 1), (480, 1))])
def test_a_thin_picture_keeps_a_pixel_and_stands_in_the_middle(size: tuple[int, int], shown: tuple[int, int]) -> None:
    sheet = ContactSheet(1, (60, 40))
    sheet.add(picture("red", size))
    rows, columns = np.nonzero((np.asarray(sheet.image) == (255, 0, 0)).all(axis=-1))
    assert (int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1) == shown
    assert int(columns.min()) == 8 + (480 - shown[0]) // 2
    assert int(rows.min()) == 8 + (320 - shown[1]) // 2


@pytest.mark.parametrize("shape", [(60, 40), (384, 384), (1600, 400)])
def test_a_sheet_of_many_pictures_is_no_larger_than_8192_pixels(shape: tuple[int, int]) -> None:
    assert max(ContactSheet(2000, shape).image.size) <= 8192 + 8


@pytest.mark.parametrize(
    ("shape", "size"),
    [((10_000, 10), (8200, 8 + 16 + 2)), ((10_000, 1), (8200, 1 + 16 + 2)), ((1, 10_000), (1 + 16, 320 + 16 + 32))],
)
def test_a_sheet_of_one_thin_picture_is_as_long_as_it_may_be(shape: tuple[int, int], size: tuple[int, int]) -> None:
    assert ContactSheet(1, shape).image.size == size


@pytest.mark.parametrize(
    ("shape", "cell"),
    [((50, 50), (320, 320)), ((40, 60), (213, 320)), ((60, 40), (480, 320)), ((1600, 400), (1280, 320))],
)
def test_a_sheet_of_few_pictures_shows_them_large(shape: tuple[int, int], cell: tuple[int, int]) -> None:
    sheet = ContactSheet(1, shape)
    sheet.add(picture("red", shape), "a file", "a label")
    rows, columns = np.nonzero((np.asarray(sheet.image) == (255, 0, 0)).all(axis=-1))
    assert (int(np.ptp(columns)) + 1, int(np.ptp(rows)) + 1) == cell
    assert (int(columns.min()), int(rows.min())) == (8, 8)
    assert sheet.image.size == (cell[0] + 16, cell[1] + 16 + 2 * 16)  # two lines of text of 13 pixels


@pytest.mark.parametrize(("room", "cell", "line"), [(480, 121, 15), (240, 57, 6), (40, 4, 1)])
def test_captions_of_small_cells_are_small(room: int, cell: int, line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sheet_module, "_MAX_SHEET", room)
    columns = rows = 3
    width, height = ContactSheet(columns * rows, (100, 100)).image.size
    assert (width, height) == (columns * (cell + 8) + 8, rows * (cell + 2 * line + 8) + 8)


@pytest.mark.parametrize("shape", [(384, 384), (1600, 400)])
def test_a_sheet_of_many_pictures_uses_its_room(shape: tuple[int, int]) -> None:
    assert max(ContactSheet(2000, shape).image.size) > 0.9 * 8192


def test_a_long_caption_is_cut_to_its_cell() -> None:
    sheet = ContactSheet(2, (60, 40))
    sheet.add(picture("red"), "W" * 500)
    red = np.nonzero((np.asarray(sheet.image) == (255, 0, 0)).all(axis=-1))[1]
    inked = np.nonzero((np.asarray(sheet.image) < 64).all(axis=-1))[1]
    assert red.max() - 20 < inked.max() <= red.max()


def test_a_caption_loses_no_more_letters_than_it_must() -> None:
    sheet = ContactSheet(1, (60, 40))
    width, font = sheet._cell[0], sheet._font
    for line in ("W" * 500, "i" * 500, "a word " * 100):
        shown = fit_text(line, font, width).removesuffix("...")
        longer = " ".join(line.split())[: len(shown) + 1]
        assert longer.startswith(shown)
        assert font.getlength(shown + "...") <= width < font.getlength(longer + "...")
    whole = next(line for line in ("i" * count for count in range(500, 0, -1)) if font.getlength(line) <= width)
    assert fit_text(whole, font, width) == whole
    assert fit_text(f" {whole[:9]}\n{whole[:9]}  ", font, width) == f"{whole[:9]} {whole[:9]}"
