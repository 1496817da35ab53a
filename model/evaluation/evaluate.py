"""Evaluation of a served model on labelled pictures, through the same predictor that serves them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.checkpoint import Checkpoint
from model.data import cifar10
from model.errors import DatasetError, ImageError
from model.evaluation.calibration import ConfidenceBin, confidence_bins, expected_calibration_error
from model.evaluation.robustness import as_png
from model.images.preprocess import preprocess
from model.prediction import Outputs, RequestedOutputs


class BatchPredictor(Protocol):
    """The part of `model.runtime.predictor.Predictor` that an evaluation needs."""

    checkpoint: Checkpoint
    max_batch: int

    def predict(self, images: NDArray[np.uint8], requests: RequestedOutputs) -> Sequence[Outputs]:
        """Return what is asked of each image of uint8 [B, H, W, C], B <= `max_batch`."""
        ...


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        count: number of images.
        accuracy: share of images whose top-1 answer is right.
        per_class: the same for the images of each class, by its label.
        loss: mean negative log-likelihood of the right class, in nats.
        calibration_error: expected calibration error of the top-1 score, 15 bins.
        confidence_bins: those bins.
        confusion: [K][K] images of the class of the row that were answered with the class of the column.
    """

    count: int
    accuracy: float
    per_class: dict[str, float]
    loss: float
    calibration_error: float
    confidence_bins: tuple[ConfidenceBin, ...]
    confusion: tuple[tuple[int, ...], ...]

    def record(self) -> dict[str, Any]:
        """Return it as JSON types, without the confusion matrix, which grows with the square of the classes."""
        values = asdict(self)
        del values["confusion"]
        return values


def evaluate_cifar10(predictor: BatchPredictor, data: Path, *, progress: bool = False) -> Evaluation:
    """Measure a predictor on CIFAR-10's 10,000 test images.

    A model that takes another size than 32 x 32 pixels sees them as the service would: through its preprocessing.

    Args:
        data: folder with the binary version of CIFAR-10.

    Raises:
        DatasetError: the data cannot be read, or the model's labels are not CIFAR-10's.
    """
    checkpoint = predictor.checkpoint
    names = cifar10.read_labels(data)
    if checkpoint.labels != names:
        raise DatasetError(f"{data}: classes {', '.join(names)} are not those of the model {checkpoint.name}")
    images = cifar10.read_test(data)
    if checkpoint.config.image_size == cifar10.IMAGE_SIZE and checkpoint.config.in_channels == cifar10.CHANNELS:
        scores = predict_scores(predictor, images.pixels, progress=progress)
    else:
        scores = predict_uploads(
            predictor, len(images), lambda n: as_png(images.pixels[n].transpose(1, 2, 0)), progress=progress
        )
    return measure(scores, images.labels, names)


def predict_uploads(
    predictor: BatchPredictor,
    count: int,
    upload: Callable[[int], bytes],
    *,
    name: Callable[[int], str] = "picture {}".format,
    progress: bool = False,
) -> NDArray[np.float32]:
    """Return all scores of pictures that come as files, through the service's own preprocessing.

    Args:
        upload: takes a picture's number, 0...count-1, and returns the bytes of its file; called on several threads.
        name: takes a picture's number and returns what a message calls it.

    Returns:
        float32 [count, K] in class order.

    Raises:
        DatasetError: a file that does not decode.
    """
    config = predictor.checkpoint.preprocess

    def read(number: int) -> NDArray[np.uint8]:
        try:
            return preprocess(upload(number), config)
        except ImageError as error:
            raise DatasetError(f"{name(number)}: {error}") from error

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return _predict_batches(predictor, count, lambda batch: np.stack(list(pool.map(read, batch))), progress)


def predict_scores(
    predictor: BatchPredictor, pixels: NDArray[np.uint8], *, progress: bool = False
) -> NDArray[np.float32]:
    """Return all scores, float32 [N, K] in class order, of images that are uint8 [N, C, H, W]."""

    def read(batch: range) -> NDArray[np.uint8]:
        return np.ascontiguousarray(pixels[batch.start : batch.stop].transpose(0, 2, 3, 1))

    return _predict_batches(predictor, len(pixels), read, progress)


def _predict_batches(
    predictor: BatchPredictor, count: int, read: Callable[[range], NDArray[np.uint8]], progress: bool
) -> NDArray[np.float32]:
    """Return the scores, float32 [count, K] in class order, of images that `read` gives as uint8 [B, H, W, C]."""
    classes = predictor.checkpoint.config.num_classes
    scores = np.empty((count, classes), dtype=np.float32)
    with tqdm(total=count, desc="evaluate", unit="img", disable=None if progress else True) as bar:
        for start in range(0, count, predictor.max_batch):
            batch = range(start, min(start + predictor.max_batch, count))
            for row, answer in zip(batch, predictor.predict(read(batch), RequestedOutputs(classes)), strict=True):
                scores[row, answer.indices] = answer.scores
            bar.update(len(batch))
    return scores


def measure(scores: NDArray[np.float32], labels: NDArray[np.int64], names: tuple[str, ...]) -> Evaluation:
    """Evaluate scores against the right labels.

    Args:
        scores: [N, K], each row summing to 1.
        labels: [N].
        names: names of the K classes, all different.

    Raises:
        DatasetError: no images.
    """
    count = len(labels)
    if count == 0:
        raise DatasetError("nothing to evaluate: no images")
    answers = scores.argmax(axis=1)
    correct = answers == labels
    confusion = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(confusion, (labels, answers), 1)
    images = confusion.sum(axis=1)
    bins = confidence_bins(scores.max(axis=1), correct)
    right_class = scores[np.arange(count), labels].astype(np.float64)
    return Evaluation(
        count=count,
        accuracy=float(correct.mean()),
        per_class={name: float(confusion[i, i] / images[i]) for i, name in enumerate(names) if images[i]},
        # A score that underflowed to 0 costs as much as the smallest number above it, not infinity.
        loss=float(-np.log(right_class.clip(np.finfo(np.float32).tiny)).mean()),
        calibration_error=expected_calibration_error(bins),
        confidence_bins=bins,
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )
