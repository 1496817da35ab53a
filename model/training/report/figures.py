"""The figures of a model card, in the folder `figures/` beside it: learning curve, confusion matrix, calibration.

Each function that draws writes a PNG to `path` and raises FigureError where the file cannot be written.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from model.evaluation.calibration import ConfidenceBin, expected_calibration_error
from model.evaluation.evaluate import Evaluation
from model.insight.figures import available, canvas, save
from model.training.run_folder import EpochMetrics

logger = logging.getLogger(__name__)

FOLDER: Final = "figures"
CONFUSION_MATRIX: Final = "confusion_matrix.png"
CALIBRATION: Final = "calibration.png"
LEARNING_CURVE: Final = "learning_curve.png"
_NAMED_CLASSES: Final = 40
"""Up to this many classes, a confusion matrix has room for their names."""
_NUMBERED_CLASSES: Final = 16
"""Up to this many classes, it has room for a number in every cell."""


def write_figures(
    out: Path, measured: Evaluation, labels: Sequence[str], history: Sequence[EpochMetrics]
) -> tuple[str, ...]:
    """Draw the figures of the card, and return their file names.

    They go to `figures/` in `out`. Without matplotlib only the confusion matrix is written, as CSV; without epochs
    there is no learning curve.

    Raises:
        FigureError: a file cannot be written.
    """
    folder = out / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "confusion_matrix.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["truth", *labels])
        writer.writerows([label, *row] for label, row in zip(labels, measured.confusion, strict=True))
    if not available():
        logger.warning(
            "no figures are drawn: they need matplotlib (.venv/bin/pip install -c constraints.txt -e '.[figures]')"
        )
        return ()
    confusion_matrix(measured.confusion, labels, folder / CONFUSION_MATRIX)
    reliability_diagram(measured.confidence_bins, folder / CALIBRATION)
    if not history:
        return CONFUSION_MATRIX, CALIBRATION
    learning_curve(history, folder / LEARNING_CURVE)
    return CONFUSION_MATRIX, CALIBRATION, LEARNING_CURVE


def learning_curve(rows: Sequence[EpochMetrics], path: Path) -> None:
    """Draw loss and accuracy by epoch, on augmented training images and on validation images; mark the best epoch.

    Args:
        rows: of all epochs, in order; not empty.
    """
    figure = canvas(9, 3.6)
    left, right = figure.subplots(1, 2)
    epochs = [row.epoch for row in rows]
    left.plot(epochs, [row.train_loss for row in rows], label="training (augmented, smoothed)", color="tab:gray")
    right.plot(epochs, [100 * row.train_accuracy for row in rows], label="training (augmented)", color="tab:gray")
    validated = [
        (row.epoch, row.validation_loss, row.validation_accuracy)
        for row in rows
        if row.validation_loss is not None and row.validation_accuracy is not None
    ]
    if validated:
        when = [epoch for epoch, _, _ in validated]
        style = {"label": "validation", "color": "tab:blue", "marker": "." if len(validated) < 60 else ""}
        left.plot(when, [loss for _, loss, _ in validated], **style)
        right.plot(when, [100 * share for _, _, share in validated], **style)
        best, _, accuracy = max(validated, key=lambda row: row[2])
        name = f"best: {accuracy:.2%}, epoch {best}"
        right.plot([best], [100 * accuracy], "o", color="tab:red", markersize=8, fillstyle="none", label=name)
        for axes in (left, right):
            axes.axvline(best, color="tab:red", linewidth=0.8, linestyle=":")
    left.set(xlabel="epoch", ylabel="loss in nats")
    right.set(xlabel="epoch", ylabel="accuracy in %")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save(figure, path)


def confusion_matrix(matrix: NDArray[np.int64] | Sequence[Sequence[int]], labels: Sequence[str], path: Path) -> None:
    """Draw the confusion matrix: rows are the truth, columns the answer, shares of a row in colour.

    Args:
        matrix: [K, K] images of class i that were answered with class j.
        labels: names of the K classes.
    """
    counts = np.asarray(matrix, dtype=np.int64)
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    classes = len(labels)
    size = min(12.0, 3.2 + 0.4 * min(classes, _NAMED_CLASSES))
    figure = canvas(size + 0.8, size)
    axes = figure.subplots()
    picture = axes.imshow(100 * shares, cmap="Blues", vmin=0, vmax=100)
    axes.set(xlabel="answered", ylabel="truth")
    if classes <= _NAMED_CLASSES:
        short = [label if len(label) <= 18 else f"{label[:17]}…" for label in labels]
        axes.set_xticks(range(classes), short, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        axes.set_yticks(range(classes), short, fontsize=8)
    if classes <= _NUMBERED_CLASSES:
        for (truth, answer), count in np.ndenumerate(counts):
            if count:
                colour = "white" if shares[truth, answer] > 0.5 else "black"
                axes.text(answer, truth, f"{count}", ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(picture, ax=axes, label="% of the class's images", shrink=0.8)
    save(figure, path)


def reliability_diagram(bins: Sequence[ConfidenceBin], path: Path) -> None:
    """Draw accuracy against confidence (Guo et al. 2017, figure 1); calibrated scores lie on the diagonal.

    Args:
        bins: equally wide bins of the top-1 score, in order over 0...1; at least one image in them.
    """
    figure = canvas(4.6, 5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    edges = np.linspace(0, 1, len(bins) + 1)
    centres, width = (edges[1:] + edges[:-1]) / 2, 1 / len(bins)
    counts = np.array([group.count for group in bins])
    filled = counts > 0
    accuracy = np.array([group.accuracy for group in bins])
    confidence = np.array([group.confidence for group in bins])
    upper.bar(centres[filled], accuracy[filled], width, color="tab:blue", edgecolor="white", label="accuracy")
    upper.plot(confidence[filled], accuracy[filled], ".", color="black", label="at mean confidence")
    upper.plot([0, 1], [0, 1], "--", color="tab:red", linewidth=1, label="perfect")
    error = expected_calibration_error(bins)
    upper.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), title=f"expected calibration error {error:.2%}")
    upper.legend(fontsize=8)
    upper.grid(alpha=0.3)
    lower.bar(centres, 100 * counts / counts.sum(), width, color="tab:gray", edgecolor="white")
    lower.set(xlabel="confidence (top-1 score)", ylabel="% of images")
    save(figure, path)
