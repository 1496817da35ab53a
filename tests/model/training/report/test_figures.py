"""The figures of a model card as a reader of the file would judge them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from model.evaluation.calibration import ConfidenceBin
from model.training.report.figures import confusion_matrix, learning_curve, reliability_diagram
from model.training.run_folder import EpochMetrics
from tests.model.insight.drawn import near, read

pytestmark = pytest.mark.timeout(90)  # matplotlib draws


def epoch(number: int, loss: float | None, accuracy: float | None) -> EpochMetrics:
    return EpochMetrics(number, 400, 1e-3, 1.0, 0.5, loss, accuracy, 100.0, 9.0)


def test_the_best_validation_epoch_is_marked_where_it_is(tmp_path: Path) -> None:
    def curve(best: int) -> float:
        rows = [epoch(n, 1.0, 0.9 if n == best else 0.5) for n in range(1, 11)]
        learning_curve(rows, tmp_path / "curve.png")
        picture = read(tmp_path / "curve.png")
        left = near(picture, (214, 39, 40))[:, : picture.shape[1] // 2]  # the red line in the left half
        return float(np.nonzero(left.any(axis=0))[0].mean())

    assert curve(3) < curve(8)


def test_a_learning_curve_needs_no_validation_epoch(tmp_path: Path) -> None:
    learning_curve([epoch(1, None, None)], tmp_path / "curve.png")
    assert not near(read(tmp_path / "curve.png"), (214, 39, 40)).any()


def test_confusions_are_dark_where_the_images_are(tmp_path: Path) -> None:
    confusion_matrix(np.diag([50, 50, 50]), ("a", "b", "c"), tmp_path / "right.png")
    confusion_matrix(np.full((3, 3), 50), ("a", "b", "c"), tmp_path / "even.png")
    dark = (8, 48, 107)  # the end of matplotlib's Blues
    right, even = (near(read(tmp_path / name), dark) for name in ("right.png", "even.png"))
    left_half = slice(0, right.shape[1] * 3 // 4)  # without the colour bar
    assert right[:, left_half].sum() > 20 * even[:, left_half].sum()


@pytest.mark.parametrize("classes", [1, 10, 40, 300])
def test_any_number_of_classes_gives_a_picture_of_bounded_size(classes: int, tmp_path: Path) -> None:
    labels = [f"a class with a rather long name, number {n}" for n in range(classes)]
    confusion_matrix(np.eye(classes, dtype=np.int64), labels, tmp_path / "m.png")
    assert max(read(tmp_path / "m.png").shape) < 2000


def test_empty_bins_are_left_out_of_the_reliability_diagram(tmp_path: Path) -> None:
    bins = [ConfidenceBin(0, 0.0, 0.0), ConfidenceBin(10, 0.5, 0.9), ConfidenceBin(30, 0.95, 0.95)]
    reliability_diagram(bins, tmp_path / "c.png")
    few = near(read(tmp_path / "c.png"), (31, 119, 180)).sum()
    reliability_diagram([ConfidenceBin(10, 0.2, 0.9), *bins[1:]], tmp_path / "c.png")
    assert near(read(tmp_path / "c.png"), (31, 119, 180)).sum() > 1.2 * few
