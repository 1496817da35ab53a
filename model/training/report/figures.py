"""The figures of a model card, in the folder `figures/` beside it."""

from __future__ import annotations

import csv
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from model.evaluation.evaluate import Evaluation
from model.insight import figures

logger = logging.getLogger(__name__)

FOLDER: Final = "figures"
CONFUSION_MATRIX: Final = "confusion_matrix.png"
CALIBRATION: Final = "calibration.png"
LEARNING_CURVE: Final = "learning_curve.png"


def write_figures(
    out: Path, measured: Evaluation, labels: Sequence[str], history: Sequence[figures.Epoch]
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
    if not figures.available():
        logger.warning("the card has no pictures, as they need matplotlib: pip install -e '.[figures]' in the clone")
        return ()
    figures.confusion_matrix(measured.confusion, labels, folder / CONFUSION_MATRIX)
    figures.reliability_diagram(measured.confidence_bins, folder / CALIBRATION)
    if not history:
        return CONFUSION_MATRIX, CALIBRATION
    figures.learning_curve(history, folder / LEARNING_CURVE)
    return CONFUSION_MATRIX, CALIBRATION, LEARNING_CURVE
