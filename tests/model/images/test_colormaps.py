"""The scale of the colour bar: a tick stands beside the colour that it names."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from model.images.legend import with_colorbar

LEVELS = np.full((256, 3), (7, 0, 200), np.uint8)
LEVELS[:, 1] = np.arange(256)
"""A colour tells its level, and is told from the greys of writing."""

WIDTH = 50


def bar_and_ticks(height: int, full_scale: float) -> tuple[np.ndarray, list[int], np.ndarray]:
    """Return the levels of the bar, from its top, the rows of the ticks as rows of the bar, and all that is added."""
    drawn = np.asarray(with_colorbar(Image.new("RGB", (WIDTH, height), "red"), LEVELS, full_scale))
    added = drawn[:, WIDTH:]
    rows, columns = np.nonzero((added[:, :, [0, 2]] == (7, 200)).all(axis=2))
    assert len(rows) == (np.ptp(rows) + 1) * (np.ptp(columns) + 1), "nothing lies over the bar"
    bar = added[rows.min() : rows.max() + 1]
    beside = bar[:, columns.max() + 1 : columns.max() + 3]
    return bar[:, columns.min(), 1], list(np.nonzero((beside == 0).all(axis=(1, 2)))[0]), added


@pytest.mark.parametrize("full_scale", [1.5, 4.0, 150.0])
@pytest.mark.parametrize("height", [96, 384, 1000])
def test_a_tick_stands_beside_the_colour_of_its_ratio(height: int, full_scale: float) -> None:
    bar, ticks, _ = bar_and_ticks(height, full_scale)
    assert (bar[0], bar[-1]) == (255, 0)
    assert (np.diff(bar.astype(int)) <= 0).all()
    assert (ticks[0], ticks[-1]) == (0, len(bar) - 1)
    octave = np.log(2) / np.log(full_scale)
    for tick in ticks[1:-1]:
        octaves = bar[tick] / 255 / octave
        assert abs(octaves - round(octaves)) * octave < 1 / len(bar) + 1 / 255


@pytest.mark.parametrize(("height", "text"), [(96, 10), (140, 10), (307, 10), (308, 11), (560, 20), (1000, 32)])
def test_writing_has_room_between_the_ticks(height: int, text: int) -> None:
    bar, ticks, added = bar_and_ticks(height, 1e9)
    assert len(bar) == height - 4 * text
    assert 2 <= len(ticks) <= max(2, len(bar) // (2 * text))
    assert np.diff(ticks)[1:].min(initial=len(bar)) >= 1.5 * text
    assert (added[:, -text // 2 :] == 255).all()  # nothing is cut off
    assert (added[: text // 2] == 255).all()


def test_a_drawing_lower_than_the_scale_stands_on_white() -> None:
    drawn = np.asarray(with_colorbar(Image.new("RGB", (WIDTH, 20), "red"), LEVELS, 4.0))
    assert drawn.shape[0] == 96
    assert (drawn[:20, :WIDTH] == (255, 0, 0)).all()
    assert (drawn[20:, :WIDTH] == 255).all()
