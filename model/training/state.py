"""Files that the loop writes after each epoch: the state to resume from, which never holds code, and the metrics.

Each is whole or absent, whenever the process ends.
"""

from __future__ import annotations

import csv
import pickle
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from model.errors import TrainingError
from model.training.recipe import Recipe, parse_recipe

METRICS_FILE: Final = "metrics.csv"
_VERSION: Final = 1


@dataclass(frozen=True)
class EpochMetrics:
    """A row of `metrics.csv`.

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


def write_state(path: Path, recipe: Recipe, state: dict[str, Any]) -> None:
    """Replace the state on disk; an interruption leaves the old file or the new one."""
    part = path.with_name(f"{path.name}.part")
    torch.save({"version": _VERSION, "recipe": recipe.model_dump_json(), **state}, part)
    part.replace(path)


def read_state(path: Path, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Read the state that `write_state` wrote.

    Args:
        recipe: the run's recipe. The state's must equal it, with defaults for fields that it does not name.
        device: where the tensors go.

    Raises:
        TrainingError: no state there, unreadable, or of another recipe.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's remarks on pickles that it refuses
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except OSError as error:
        raise TrainingError(f"{path}: nothing to resume: {error.strerror}") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        # Torch's own message advises to load it without the protection against code.
        raise TrainingError(f"{path}: not a training state, or damaged; start afresh in another folder") from error
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise TrainingError(f"{path}: not a training state of this version; start afresh in another folder")
    if parse_recipe(str(state.get("recipe")), str(path)) != recipe:
        raise TrainingError(f"{path}: made with another recipe; resume with that recipe or start in another folder")
    return state
