"""Sizes, parts and orders of passes as numbers, without decoding a picture."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from model.images import resize
from model.images.decode import DecodedImage
from model.images.preprocess import TRANSPOSE, _Span, _span, _stored_box, min_decoded_size, resized_size
from tests.model.images.pictures import config

BICUBIC, NEAREST, BOX = Image.Resampling.BICUBIC, Image.Resampling.NEAREST, Image.Resampling.BOX


@pytest.mark.parametrize(
    ("how", "resize_size", "source", "expected"),
    [
        ("squash", (20, 30), (77, 55), (30, 20)),
        ("border", (20, 30), (60, 60), (20, 20)),
        ("border", (20, 30), (90, 30), (30, 10)),
        ("border", (20, 30), (1000, 1), (30, 1)),
        ("border", (20, 30), (1, 1000), (1, 20)),
        ("shortest_edge", (32, 32), (64, 48), (42, 32)),
        ("shortest_edge", (32, 32), (48, 64), (32, 42)),
        ("shortest_edge", (32, 32), (50, 50), (32, 32)),
        ("shortest_edge", (20, 30), (60, 60), (30, 30)),
        ("shortest_edge", (20, 30), (90, 30), (60, 20)),
    ],
)
def test_the_size_that_a_picture_is_resized_to(how, resize_size, source, expected):
    chosen = config((16, 16), resize_size, resize=how)
    width, height = source
    assert resized_size(width, height, chosen) == expected
    assert min_decoded_size(chosen)(width, height) == (2 * expected[0], 2 * expected[1])


@pytest.mark.parametrize(
    ("source", "resized", "wanted", "resample", "rounding", "exact", "expected"),
    [
        (100, 50, 30, BICUBIC, "even", False, _Span(20, 80, 30, 0)),
        (100, 50, 30, BICUBIC, "even", True, _Span(20, 80, 30, 0)),
        (70, 35, 30, BICUBIC, "even", False, _Span(4, 64, 30, 0)),  # 2.5 goes to 2
        (74, 37, 30, BICUBIC, "even", False, _Span(8, 68, 30, 0)),  # and 3.5 to 4
        (74, 37, 30, BICUBIC, "down", False, _Span(6, 66, 30, 0)),
        (100, 30, 28, BICUBIC, "even", True, _Span(0, 100, 30, 1)),  # two pixels more, for exact corners
        (100, 30, 24, BICUBIC, "even", True, _Span(10, 90, 24, 0)),
        (100, 30, 26, BICUBIC, "even", True, _Span(2 * 100 / 30, 28 * 100 / 30, 26, 0)),  # four would be too many
        (100, 24, 22, BICUBIC, "even", True, _Span(0, 100, 24, 1)),
        (100, 24, 18, BICUBIC, "even", True, _Span(12.5, 87.5, 18, 0)),
        (100, 30, 10, NEAREST, "even", True, _Span(0, 100, 30, 10)),
        (100, 30, 10, BOX, "even", True, _Span(0, 100, 30, 10)),
        (100, 4096, 10, NEAREST, "even", True, _Span(0, 100, 4096, 2043)),
        (100, 4097, 11, NEAREST, "even", True, _Span(2043 * 100 / 4097, 2054 * 100 / 4097, 11, 0)),
        (20, 30, 10, BICUBIC, "even", True, _Span(0, 20, 30, 10)),
        (30, 30, 10, BICUBIC, "even", True, _Span(10, 20, 10, 0)),
    ],
)
def test_the_part_of_an_axis_that_is_resized(source, resized, wanted, resample, rounding, exact, expected):
    assert _span(source, resized, wanted, resample, rounding, exact=exact) == expected


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_part_of_the_upright_picture_is_found_in_the_stored_one(orientation):
    stored = Image.fromarray(np.arange(20 * 12, dtype=np.uint8).reshape(12, 20))
    turn = TRANSPOSE.get(orientation)
    upright = stored if turn is None else stored.transpose(turn)
    across, down = _Span(1, 7, 6, 0), _Span(2, 5, 3, 0)
    for scale in (1, 2):
        left, top, right, bottom = _stored_box(across, down, DecodedImage(stored, stored.size, scale, orientation))
        part = stored.crop((left * scale, top * scale, right * scale, bottom * scale))
        assert (part if turn is None else part.transpose(turn)).tobytes() == upright.crop((1, 2, 7, 5)).tobytes()


@pytest.mark.parametrize(
    ("by_shrinkage", "source", "target", "expected"),
    [
        (True, (100, 100), (50, 40), False),
        (True, (100, 100), (90, 70), True),
        (True, (100, 100), (90, 80), False),
        (True, (100, 100), (90, 79), True),
        (True, (100, 100), (200, 99), True),
        (True, (100, 100), (200, 100), False),
        (True, (10, 300), (5, 301), False),
        (False, (100, 100), (90, 70), False),
        (False, (1, 100), (1, 50), False),
        (False, (1, 101), (1, 50), True),
        (False, (1, 101), (1, 101), False),
    ],
)
def test_the_order_of_the_passes(by_shrinkage, source, target, expected, monkeypatch):
    monkeypatch.setattr(resize, "_ORDER_BY_SHRINKAGE", by_shrinkage)
    assert resize.passes_rows_first(source, target) is expected


def test_a_box_is_cut_where_it_leaves_the_picture():
    assert resize._within((-0.5, -0.25, 10.5, 7.75), (10, 7)) == (0, 0, 10, 7)
    assert resize._within((0.25, 0.5, 9.5, 6.5), (10, 7)) == (0.25, 0.5, 9.5, 6.5)


@pytest.mark.parametrize("rows_first", [True, False])
@pytest.mark.parametrize("strip", [1, 100, 4_000_000])
@pytest.mark.parametrize("box", [(3.0, 5.0, 45.0, 33.0), (30.0, 20.0, 50.0, 40.0), (0.0, 0.0, 20.0, 15.0)])
def test_strips_of_any_height_make_the_same_picture(rows_first, strip, box, monkeypatch):
    picture = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 50), dtype=np.uint8))
    whole = resize.resize(picture, (12, 9), box, BICUBIC, convert=lambda piece: piece, rows_first=rows_first)
    monkeypatch.setattr(resize, "_STRIP_PIXELS", strip)
    striped = resize.resize(picture, (12, 9), box, BICUBIC, convert=lambda piece: piece, rows_first=rows_first)
    assert striped.tobytes() == whole.tobytes()
    assert striped.size == (12, 9)
    direct = np.asarray(picture.resize((12, 9), BICUBIC, box)).astype(int)
    assert np.abs(np.asarray(striped).astype(int) - direct).max() <= 8
