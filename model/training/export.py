"""Rounding of weights to what is stored, their temperature, and their measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.data.labelled_images import Images
from model.evaluation.calibration import fit_temperature
from model.evaluation.evaluate import Evaluation, measure, predict_scores
from model.runtime.predictor import Predictor

STORED_DTYPE: Final = torch.float16
"""Dtype of the weights on disk."""

MIN_CALIBRATION_IMAGES: Final = 30
"""The fewest validation images that a temperature is fitted to; from fewer it would be noise."""


@dataclass(frozen=True)
class CalibratedCheckpoint:
    """A checkpoint as it is stored and served, with its evaluations.

    Attributes:
        checkpoint: float32, rounded to `STORED_DTYPE`, with its temperature.
        predictor: runs the same weights without the temperature.
        validation, validation_uncalibrated: on the validation set, with the temperature and without it.
    """

    checkpoint: Checkpoint
    predictor: Predictor
    validation: Evaluation
    validation_uncalibrated: Evaluation


def round_and_calibrate(
    checkpoint: Checkpoint, validation: Images, *, device: str, progress: bool
) -> CalibratedCheckpoint:
    """Measure the very numbers that will be served, and fit the temperature to them.

    The temperature is left at 1 where the validation images are fewer than `MIN_CALIBRATION_IMAGES`, or where all are
    answered right, so that a lower temperature would always look better.

    Args:
        checkpoint: float32; its temperature is not used.
        validation: images that were not trained on, in the checkpoint's size.
        device: see `model.runtime.device.choose_device`.

    Raises:
        CheckpointError: a weight is not finite, or too large for the stored dtype.
    """
    rounded = {name: tensor.detach().cpu().to(STORED_DTYPE).float() for name, tensor in checkpoint.tensors.items()}
    stored = replace(checkpoint, tensors=rounded, temperature=1.0)
    predictor = Predictor(stored, device=device, backend="torch", dtype="float32", compile_mode="off")
    logits = log_scores(predictor, validation, progress=progress)
    truth = torch.from_numpy(validation.labels)
    all_right = bool((logits.argmax(dim=1) == truth).all())
    if not all_right and len(truth) >= MIN_CALIBRATION_IMAGES:
        stored = replace(stored, temperature=fit_temperature(logits, truth))
    return CalibratedCheckpoint(stored, predictor, *measure_calibrated(logits, validation, stored))


def log_scores(predictor: Predictor, images: Images, *, progress: bool) -> Tensor:
    """Return the log of an uncalibrated predictor's scores, float32 [N, K]: its logits but for a constant a row."""
    scores = torch.from_numpy(predict_scores(predictor, images.pixels, progress=progress))
    return scores.clamp_min(torch.finfo(scores.dtype).tiny).log()


def measure_calibrated(logits: Tensor, images: Images, checkpoint: Checkpoint) -> tuple[Evaluation, Evaluation]:
    """Evaluate logits [N, K] with the checkpoint's temperature and without it."""
    calibrated, uncalibrated = (
        measure((logits / temperature).softmax(dim=1).numpy(), images.labels, checkpoint.labels)
        for temperature in (checkpoint.temperature, 1.0)
    )
    return calibrated, uncalibrated
