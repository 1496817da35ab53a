"""Evaluation of a model on labelled pictures, through the predictor that serves it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import DatasetError
from model.extensions.datasets.pictures import PictureFiles
from model.extensions.evaluation.calibration import calibration_error
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
        calibration_error: expected calibration error of the top-1 score.
        confusion: number of images by right class (row) and answered class (column), [K][K].
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
        scores: [N, K]; each row sums to 1.
        labels: index of the right class of each image, [N].
        names: distinct names of the K classes.

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
        # A score that underflowed to 0 counts as the smallest number above 0.
        loss=float(-np.log(right_class.clip(np.finfo(np.float32).tiny)).mean()),
        calibration_error=calibration_error(scores.max(axis=1), answers == labels),
        confusion=tuple(tuple(row) for row in confusion.tolist()),
    )


def outputs_of(
    predictor: Predictor, pictures: PictureFiles | NDArray[np.uint8], requested: RequestedOutputs
) -> Iterator[Outputs]:
    """Yield the outputs of pictures in order.

    Args:
        predictor: the model.
        pictures: files, which get the preprocessing of the service; or uint8 [N, C, H, W] of the
            model's size.
        requested: the request for each picture.

    Raises:
        DatasetError: a file cannot be read or decoded.
    """

    def read(number: int) -> NDArray[np.uint8]:
        if not isinstance(pictures, PictureFiles):
            return np.moveaxis(pictures[number], 0, -1)
        return pictures.decode(number, predictor.checkpoint.preprocess)

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tqdm(total=len(pictures), desc="evaluate", unit="img", disable=None) as bar,
    ):
        for start in range(0, len(pictures), predictor.max_batch):
            batch = range(start, min(start + predictor.max_batch, len(pictures)))
            yield from predictor.predict(np.stack(list(pool.map(read, batch))), requested)
            bar.update(len(batch))


def scores_and_members(
    predictor: Predictor,
    pictures: PictureFiles | NDArray[np.uint8],
    classes: int,
    *,
    label_set: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the score of each class, and whether the class is in the set of labels.

    Args:
        predictor: the model.
        pictures: N pictures, see `outputs_of`.
        classes: number of classes, K.
        label_set: whether the model gives sets of labels; else they are empty.

    Returns:
        float32 and bool, [N, K].
    """
    scores = np.empty((len(pictures), classes), dtype=np.float32)
    members = np.zeros((len(pictures), classes), dtype=np.bool_)
    requested = RequestedOutputs(classes, label_set=label_set)
    for row, answer in enumerate(outputs_of(predictor, pictures, requested)):
        scores[row, answer.indices] = answer.scores
        if answer.label_set is not None:
            members[row, answer.label_set] = True
    return scores, members


def predict_logits(
    predictor: Predictor, pictures: PictureFiles | NDArray[np.uint8]
) -> NDArray[np.float32]:
    """Return the logits of pictures (see `outputs_of`), float32 [N, K]."""
    answers = outputs_of(predictor, pictures, RequestedOutputs(1, logits=True))
    return np.stack([answer.logits for answer in answers if answer.logits is not None])


def predict_embeddings(
    predictor: Predictor, pixels: NDArray[np.uint8], pool: Pooling = "head"
) -> NDArray[np.float32]:
    """Return the embeddings of images, float32 [N, D].

    Args:
        predictor: the model.
        pixels: uint8 [N, C, H, W].
        pool: name of the embedding.

    Raises:
        DatasetError: an embedding is not finite.
    """
    requested = RequestedOutputs(1, embedding=EmbeddingRequest(pool))
    answers = outputs_of(predictor, pixels, requested)
    features: NDArray[np.float32] = np.stack(
        [answer.embedding for answer in answers if answer.embedding is not None]
    )
    if not np.isfinite(features).all():
        raise DatasetError(f"{predictor.checkpoint.source}: gives features that are not finite")
    return features
