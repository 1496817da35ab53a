"""Files from suites of other software: upright, and as their references. `tests/acceptance` asks a server of all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.images.preprocess import preprocess
from tests.model.images.pictures import config

pytestmark = pytest.mark.shared


@pytest.fixture(scope="module")
def folder(shared: Path) -> Path:
    path = shared / "data" / "torture"
    if not path.is_dir():
        pytest.skip(f"no torture files: {path} does not exist")
    return path


def likeness(left: np.ndarray, right: np.ndarray) -> float:
    """Correlation of two pictures, which were compressed apart from one another."""
    return float(np.corrcoef(left.ravel().astype(float), right.ravel().astype(float))[0, 1])


def test_rotated_avif_files_come_out_upright(folder):
    pictures = [
        preprocess((folder / "avif" / f"rot{number}mir0.avif").read_bytes(), config((64, 64))) for number in range(4)
    ]

    for number, picture in enumerate(pictures):
        assert likeness(picture, pictures[0]) > 0.9, number


@pytest.mark.parametrize(
    "name",
    ["grayscale_24x16_sampling2x2", "grayscale_long", "jpg-cmyk-1", "jpg-cmyk-2", "jpg-size-33x33", "jpg-size-8x8"],
)
def test_jpegs_decode_to_their_reference_pixels(folder, name):
    reference = folder / "jpeg-reftest" / f"{name}.png"
    wanted = config((16, 16), resize="squash")

    got, expected = (preprocess(path.read_bytes(), wanted) for path in (reference.with_suffix(".jpg"), reference))

    assert np.abs(got.astype(int) - expected).mean() < 4
