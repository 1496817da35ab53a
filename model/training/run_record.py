"""The record of a training run: what went in and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from model.evaluation.evaluate import Evaluation
from model.training.recipe import Recipe


@dataclass(frozen=True)
class RunRecord:
    """What came of a run; written into the checkpoint's `training` record and told by its card.

    Attributes:
        recipe: what was asked for.
        data: what it was trained on: `CIFAR-10`, or the name of a folder of pictures.
        started_from: name of the checkpoint that was fine-tuned; None: trained from scratch.
        kept_epoch: the epoch whose weights are kept.
        epochs: as far as training came; the last may be a part of one when the recipe bounds the time.
        images: training images; `validation_images` were set aside from the same files.
        seconds: wall time of training, evaluations on the validation images included.
        device: what it ran on. `precision`: dtype of activations and gradients there.
        parameters: of the model.
        versions: of Python and the packages that matter.
        temperature: fitted on the validation images; 1 where they cannot tell it (see `round_and_calibrate`).
        validation, validation_uncalibrated: measured with it and without it (temperature 1).
        test, test_uncalibrated: the same on the test images; None where the data have none.
    """

    recipe: Recipe
    data: str
    started_from: str | None
    kept_epoch: int
    epochs: float
    images: int
    validation_images: int
    seconds: float
    device: str
    precision: str
    parameters: int
    versions: Mapping[str, str]
    temperature: float
    validation: Evaluation
    validation_uncalibrated: Evaluation
    test: Evaluation | None
    test_uncalibrated: Evaluation | None

    def record(self) -> dict[str, Any]:
        """As JSON types."""
        measured = {name: value.record() for name, value in vars(self).items() if isinstance(value, Evaluation)}
        return {
            **asdict(self),
            **measured,
            "recipe": self.recipe.model_dump(mode="json"),
            "versions": dict(self.versions),
        }
