"""Figures as a reader of the file would judge them: where the colours are, not which calls drew them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from model.errors import FigureError
from model.insight import figures
from tests.model.insight.drawn import read

pytestmark = pytest.mark.timeout(90)  # matplotlib draws


def test_analysis_figures_take_grids_that_are_not_square_and_any_channels(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for channels in (1, 3):
        filters = generator.normal(size=(9, channels, 4, 4)).astype(np.float32)
        figures.patch_filters(filters, np.full(9, 0.1, np.float32), tmp_path / "f.png")
        colourful = np.ptp(read(tmp_path / "f.png").astype(int), axis=-1).max() > 50
        assert colourful == (channels == 3)
    figures.position_similarity(generator.uniform(-1, 1, (3, 20, 3, 20)).astype(np.float32), tmp_path / "p.png")
    height, width = read(tmp_path / "p.png").shape[:2]
    assert width > height
    figures.attention_distance(generator.uniform(0, 100, (6, 3)), tmp_path / "d.png", even=50.0)
    assert read(tmp_path / "d.png").std() > 10


def test_the_same_numbers_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        figures.attention_distance(np.ones((2, 2)), tmp_path / name, even=1.0)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_pyplot_and_its_global_state_stay_out(tmp_path: Path) -> None:
    figures.attention_distance(np.ones((2, 2)), tmp_path / "d.png", even=1.0)
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.insight.figures.find_spec", lambda name: None)
    with pytest.raises(FigureError, match=r"pip install -e '\.\[figures\]'"):
        figures.attention_distance(np.ones((2, 2)), tmp_path / "c.png", even=1.0)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(FigureError, match="taken"):
        figures.attention_distance(np.ones((2, 2)), tmp_path / "taken" / "c.png", even=1.0)
