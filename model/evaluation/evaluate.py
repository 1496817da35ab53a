"""Evaluation of a served model on labelled pictures, through the same predictor that serves them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import DatasetError, ImageError
from model.evaluation.calibration import ConfidenceBin, confidence_bins, expected_calibration_error
from model.images.preprocess import preprocess
from model.outputs import EmbeddingRequest, Outputs, RequestedOutputs
from model.runtime.predictor import Predictor


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


def predict_uploads(
    predictor: Predictor,
    count: int,
    upload: Callable[[int], bytes],
    *,
    name: Callable[[int], str] = "picture {}".format,
    progress: bool = False,
) -> NDArray[np.float32]:
    """Return all scores of pictures that come as files, float32 [count, K] in class order; as `outputs_of_uploads`."""
    requested = RequestedOutputs(predictor.checkpoint.config.num_classes)
    outputs = outputs_of_uploads(predictor, requested, count, upload, name=name, progress=progress)
    return scores_and_members(outputs, count, requested.top_k)[0]


def outputs_of_uploads(
    predictor: Predictor,
    requested: RequestedOutputs,
    count: int,
    upload: Callable[[int], bytes],
    *,
    name: Callable[[int], str] = "picture {}".format,
    progress: bool = False,
) -> Iterator[Outputs]:
    """Yield the outputs of pictures that come as files, in order, through the service's own preprocessing.

    Args:
        requested: of each picture.
        upload: takes a picture's number, 0...count-1, and returns the bytes of its file; called on several threads.
        name: takes a picture's number and returns what a message calls it.

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
        yield from _outputs(
            predictor, count, lambda batch: np.stack(list(pool.map(read, batch))), requested, "evaluate", progress
        )


def predict_scores(predictor: Predictor, pixels: NDArray[np.uint8], *, progress: bool = False) -> NDArray[np.float32]:
    """Return all scores, float32 [N, K] in class order, of images that are uint8 [N, C, H, W]."""
    requested = RequestedOutputs(predictor.checkpoint.config.num_classes)
    outputs = _outputs(predictor, len(pixels), _reader(pixels), requested, "evaluate", progress)
    return scores_and_members(outputs, len(pixels), requested.top_k)[0]


def predict_logits(predictor: Predictor, pixels: NDArray[np.uint8], *, progress: bool = False) -> NDArray[np.float32]:
    """Return the logits, float32 [N, K] in class order, of images that are uint8 [N, C, H, W]."""
    outputs = _outputs(predictor, len(pixels), _reader(pixels), RequestedOutputs(1, logits=True), "evaluate", progress)
    return np.stack([each.logits for each in outputs if each.logits is not None])


def predict_embeddings(
    predictor: Predictor, pixels: NDArray[np.uint8], *, progress: bool = False
) -> NDArray[np.float32]:
    """Return what the head reads, float32 [N, D], of images that are uint8 [N, C, H, W].

    Raises:
        DatasetError: no images, or of one it is not finite.
    """
    if not len(pixels):
        raise DatasetError("nothing to evaluate: no images")
    request = RequestedOutputs(1, embedding=EmbeddingRequest())
    answers = _outputs(predictor, len(pixels), _reader(pixels), request, "features", progress)
    embeddings = [answer.embedding for answer in answers if answer.embedding is not None]
    features: NDArray[np.float32] = np.stack(embeddings)
    if not np.isfinite(features).all():
        raise DatasetError(f"{predictor.checkpoint.source}: gives features that are not finite")
    return features


def _reader(pixels: NDArray[np.uint8]) -> Callable[[range], NDArray[np.uint8]]:
    return lambda batch: np.ascontiguousarray(pixels[batch.start : batch.stop].transpose(0, 2, 3, 1))


def scores_and_members(
    outputs: Iterable[Outputs], count: int, classes: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return what outputs have of each class, in class order, float32 and bool [count, classes].

    It is the score, and whether the class is in the set of labels.
    """
    scores, members = np.empty((count, classes), dtype=np.float32), np.zeros((count, classes), dtype=np.bool_)
    for row, each in enumerate(outputs):
        scores[row, each.indices] = each.scores
        if each.label_set is not None:
            members[row, each.label_set] = True
    return scores, members


def _outputs(
    predictor: Predictor,
    count: int,
    read: Callable[[range], NDArray[np.uint8]],
    request: RequestedOutputs,
    name: str,
    progress: bool,
) -> Iterator[Outputs]:
    """Yield what is requested of each image, in order; `name` stands before the progress bar."""
    with tqdm(total=count, desc=name, unit="img", disable=None if progress else True) as bar:
        for start in range(0, count, predictor.max_batch):
            batch = range(start, min(start + predictor.max_batch, count))
            yield from predictor.predict(read(batch), request)
            bar.update(len(batch))


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
