"""Enlargement of a map: through the values, smooth, and never beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from model.images.heatmap import monotone_cubic, nearest

POSITIONS = np.linspace(-1, 13, 141, dtype=np.float32)


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(np.float32, st.tuples(st.integers(1, 12), st.integers(1, 3)), elements=st.floats(0, 1, width=32)))
def test_a_smooth_curve_stays_between_neighbouring_values(values):
    curve = monotone_cubic(values, POSITIONS)

    left = np.floor(POSITIONS - 0.5).astype(int)
    ends = np.stack([values[(left + step).clip(0, len(values) - 1)] for step in (0, 1)])
    assert (curve >= ends.min(axis=0) - 1e-6).all() and (curve <= ends.max(axis=0) + 1e-6).all()


def test_a_smooth_curve_goes_through_the_middle_of_each_cell():
    values = np.random.default_rng(0).random((9, 4)).astype(np.float32)

    assert np.allclose(monotone_cubic(values, np.arange(9, dtype=np.float32) + 0.5), values, atol=1e-6)


def test_slopes_are_the_harmonic_means_of_the_steps_beside_and_level_at_extrema():
    values = np.array([0, 1, 3, 3], np.float32)

    # Half-way from 1 to 3: the middle of the step, and an eighth of the difference of the slopes, 2 * 1 * 2 / 3 and 0.
    assert monotone_cubic(values, np.array([2.0], np.float32)) == pytest.approx([2 + 4 / 3 / 8])


def test_a_straight_rise_stays_straight():
    inner = np.linspace(1.5, 4.5, 50, dtype=np.float32)

    assert np.allclose(monotone_cubic(np.arange(6, dtype=np.float32), inner), inner - 0.5, atol=1e-5)


def test_each_position_gets_its_own_cell():
    values = np.array([5, 6, 7], np.float32)

    assert nearest(values, np.array([-2, 0, 0.99, 1, 2.5, 3, 9], np.float32)).tolist() == [5, 5, 5, 6, 7, 7, 7]
