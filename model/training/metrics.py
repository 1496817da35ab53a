"""The metrics of each epoch, and the file that holds them."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

METRICS_FILE: Final = "metrics.csv"


@dataclass(frozen=True)
class EpochMetrics:
    """One row of `metrics.csv`.

    Attributes:
        epoch: counted from 1.
        images: number of images trained on in this epoch.
        learning_rate: of AdamW (of the head, where it differs by layer), at the epoch's last step.
        train_loss, train_accuracy: means over the epoch's augmented images as they were seen; a mixed
            image counts as its own, unmixed label.
        validation_loss, validation_accuracy: without augmentation or smoothing; None where not evaluated.
        images_per_second: of training alone.
        seconds: wall time since the run began, evaluation included, interruptions not.
    """

    epoch: int
    images: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    validation_loss: float | None
    validation_accuracy: float | None
    images_per_second: float
    seconds: float


def write_metrics(folder: Path, history: Iterable[EpochMetrics]) -> None:
    """Write `metrics.csv`; an interruption leaves the old file or the new one."""
    part = folder / f"{METRICS_FILE}.part"
    with part.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(EpochMetrics)])
        writer.writeheader()
        writer.writerows(vars(row) for row in history)
    part.replace(folder / METRICS_FILE)
