"""Evaluation of a model on labelled pictures, through the predictor that serves it."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import DatasetError, ImageError
from model.extensions.datasets.pictures import PictureFiles
from model.extensions.evaluation.calibration import calibration_error
from model.images.preprocess import preprocess
from model.outputs import EmbeddingRequest, Outputs, Pooling, RequestedOutputs
from model.runtime.predictor import Predictor


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        count: number of images.
        accuracy: share of images whose top-1 answer is right.
        per_class: the same for the images of each class, by its label.
        loss: mean negative log-likelihood of the right class, in nats.
        calibration_error: expected calibration error of the top-1 score; see `calibration_error`.
        confusion: [K][K] images of the class of the row that were answered with the class of the
        column.
    """

    count: int
    accuracy: float
    per_class: dict[str, float]
    loss: float
    calibration_error: float
    confusion: tuple[tuple[int, ...], ...]

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON types, without the large confusion matrix."""
        return {name: value for name, value in asdict(self).items() if name != "confusion"}


def measure(
    scores: NDArray[np.float32], labels: NDArray[np.int64], names: tuple[str, ...]
) -> Evaluation:
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
    confusion = np.zeros((len(names), len(names)), dtype=np.int64)
    np.add.at(confusion, (labels, answers), 1)
    images = confusion.sum(axis=1)
    right_class = scores[np.arange(count), labels].astype(np.float64)
    return Evaluation(
        count=count,
        accuracy=float((answers == labels).mean()),
        per_class={
            name: float(confusion[i, i] / images[i]) for i, name in enumerate(names) if images[i]
        },
        # A score that underflowed to 0 costs as much as the smallest number above it, not infinity.
        loss=float(-np.log(right_class.clip(np.finfo(np.float32).tiny)).mean()),
        calibration_error=calibration_error(scores.max(axis=1), answers == labels),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )


def outputs_of(
    predictor: Predictor, pictures: PictureFiles | NDArray[np.uint8], requested: RequestedOutputs
) -> Iterator[Outputs]:
    """Yield the outputs of pictures in order.

    Args:
        pictures: files, which go through the service's own preprocessing; or uint8 [N, C, H, W] of
        the model's size.

    Raises:
        DatasetError: a file cannot be read or decoded.
    """

    def read(number: int) -> NDArray[np.uint8]:
        if not isinstance(pictures, PictureFiles):
            return np.moveaxis(pictures[number], 0, -1)
        try:
            return preprocess(pictures.read(number), predictor.checkpoint.preprocess)
        except (ImageError, OSError) as error:
            raise DatasetError(f"{pictures.name(number)}: {error}") from error

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(total=len(pictures), desc="evaluate", unit="img", disable=None) as bar,
    ):
        for start in range(0, len(pictures), predictor.max_batch):
            batch = range(start, min(start + predictor.max_batch, len(pictures)))
            yield from predictor.predict(np.stack(list(pool.map(read, batch))), requested)
            bar.update(len(batch))


def scores_and_members(
    outputs: Iterable[Outputs], count: int, classes: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the score of each class, and whether it is in the set of labels.

    They are float32 and bool, [count, classes].
    """
    scores = np.empty((count, classes), dtype=np.float32)
    members = np.zeros((count, classes), dtype=np.bool_)
    for row, each in enumerate(outputs):
        scores[row, each.indices] = each.scores
        if each.label_set is not None:
            members[row, each.label_set] = True
    return scores, members


def predict_logits(
    predictor: Predictor, pictures: PictureFiles | NDArray[np.uint8]
) -> NDArray[np.float32]:
    """Return the logits, float32 [N, K] in class order, of pictures as `outputs_of` takes them."""
    outputs = outputs_of(predictor, pictures, RequestedOutputs(1, logits=True))
    return np.stack([each.logits for each in outputs if each.logits is not None])


def predict_embeddings(
    predictor: Predictor, pixels: NDArray[np.uint8], pool: Pooling = "head"
) -> NDArray[np.float32]:
    """Compute the embeddings of images, float32 [N, D].

    Args:
        pixels: uint8 [N, C, H, W].
        pool: the name of the embedding.

    Raises:
        DatasetError: an embedding is not finite.
    """
    outputs = outputs_of(predictor, pixels, RequestedOutputs(1, embedding=EmbeddingRequest(pool)))
    features: NDArray[np.float32] = np.stack(
        [each.embedding for each in outputs if each.embedding is not None]
    )
    if not np.isfinite(features).all():
        raise DatasetError(f"{predictor.checkpoint.source}: gives features that are not finite")
    return features
