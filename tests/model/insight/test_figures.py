"""Figures as a reader of the file would judge them: where the colours are, not which calls drew them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model.errors import FigureError
from model.insight import figures

pytestmark = pytest.mark.timeout(90)  # matplotlib draws


@dataclass
class Row:
    epoch: int
    train_loss: float
    train_accuracy: float
    validation_loss: float | None
    validation_accuracy: float | None


@dataclass
class Bar:
    count: int
    confidence: float
    accuracy: float


def read(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def near(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    close: NDArray[np.bool_] = np.all(np.abs(picture.astype(int) - colour) < 40, axis=-1)
    return close


def test_the_best_validation_epoch_is_marked_where_it_is(tmp_path: Path) -> None:
    def curve(best: int) -> float:
        rows = [Row(n, 1.0, 0.5, 1.0, 0.9 if n == best else 0.5) for n in range(1, 11)]
        figures.learning_curve(rows, tmp_path / "curve.png")
        picture = read(tmp_path / "curve.png")
        left = near(picture, (214, 39, 40))[:, : picture.shape[1] // 2]  # the red line in the left half
        return float(np.nonzero(left.any(axis=0))[0].mean())

    assert curve(3) < curve(8)


def test_a_learning_curve_needs_no_validation_epoch(tmp_path: Path) -> None:
    figures.learning_curve([Row(1, 2.0, 0.1, None, None)], tmp_path / "curve.png")
    assert not near(read(tmp_path / "curve.png"), (214, 39, 40)).any()


def test_confusions_are_dark_where_the_images_are(tmp_path: Path) -> None:
    figures.confusion_matrix(np.diag([50, 50, 50]), ("a", "b", "c"), tmp_path / "right.png")
    figures.confusion_matrix(np.full((3, 3), 50), ("a", "b", "c"), tmp_path / "even.png")
    dark = (8, 48, 107)  # the end of matplotlib's Blues
    right, even = (near(read(tmp_path / name), dark) for name in ("right.png", "even.png"))
    left_half = slice(0, right.shape[1] * 3 // 4)  # without the colour bar
    assert right[:, left_half].sum() > 20 * even[:, left_half].sum()


@pytest.mark.parametrize("classes", [1, 10, 40, 300])
def test_any_number_of_classes_gives_a_picture_of_bounded_size(classes: int, tmp_path: Path) -> None:
    labels = [f"a class with a rather long name, number {n}" for n in range(classes)]
    figures.confusion_matrix(np.eye(classes, dtype=np.int64), labels, tmp_path / "m.png")
    assert max(read(tmp_path / "m.png").shape) < 2000


def test_empty_bins_are_left_out_of_the_reliability_diagram(tmp_path: Path) -> None:
    bins = [Bar(0, 0.0, 0.0), Bar(10, 0.5, 0.9), Bar(30, 0.95, 0.95)]
    figures.reliability_diagram(bins, tmp_path / "c.png")
    few = near(read(tmp_path / "c.png"), (31, 119, 180)).sum()
    figures.reliability_diagram([Bar(10, 0.2, 0.9), *bins[1:]], tmp_path / "c.png")
    assert near(read(tmp_path / "c.png"), (31, 119, 180)).sum() > 1.2 * few


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
        figures.reliability_diagram([Bar(5, 0.4, 0.5), Bar(5, 0.8, 0.9)], tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_pyplot_and_its_global_state_stay_out(tmp_path: Path) -> None:
    figures.attention_distance(np.ones((2, 2)), tmp_path / "d.png", even=1.0)
    assert "matplotlib.pyplot" not in sys.modules


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.insight.figures.canvas.find_spec", lambda name: None)
    with pytest.raises(FigureError, match=r"pip install -e '\.\[figures\]'"):
        figures.reliability_diagram([Bar(5, 0.4, 0.5)], tmp_path / "c.png")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(FigureError, match="taken"):
        figures.reliability_diagram([Bar(5, 0.4, 0.5)], tmp_path / "taken" / "c.png")


@dataclass
class Faithfulness:
    method: str
    deletion: tuple[float, float, float]
    insertion: tuple[float, float, float]
    mosaic: tuple[float, float, float] | None


def test_a_methods_dots_are_where_its_means_are_and_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    def dots(deletion: float, mosaic: tuple[float, float, float] | None) -> NDArray[np.bool_]:
        baseline = Faithfulness("random", (0.1, 0.1, 0.1), (0.9, 0.9, 0.9), mosaic)
        other = Faithfulness("other", (deletion, 0.1, 0.9), (0.5, 0.4, 0.6), mosaic)
        figures.faithfulness([baseline, other], tmp_path / "f.png", title="a model")
        return near(read(tmp_path / "f.png"), (31, 119, 180))

    left, right = dots(0.2, (0.3, 0.2, 0.4)), dots(0.8, (0.3, 0.2, 0.4))
    panel = slice(0, left.shape[1] * 2 // 5)
    lower = slice(left.shape[0] // 2, None)
    assert np.nonzero(left[lower, panel].any(axis=0))[0].size  # the interval itself is as wide in both
    assert np.nonzero(left[lower, panel])[1].mean() < np.nonzero(right[lower, panel])[1].mean()
    last = slice(left.shape[1] * 7 // 10, None)
    assert left[:, last].any()
    assert not dots(0.2, None)[:, last].any()
