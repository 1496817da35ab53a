"""`vitserve evaluate`: accuracy on labelled pictures, by the model here or by a running server.

Of pictures of none of its classes, how sure the model is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.calibration import MeasuredSets
from model.data.cifar10 import is_cifar10
from model.data.datasets import EvaluationSet, open_evaluation_set
from model.data.pictures import PictureFiles
from model.errors import InputError
from model.outputs import RequestedOutputs, require_classes
from service.cli.image_files import find_images
from service.cli.server_flags import add_server_flags, client_of
from service.cli.setting_flags import MODEL_FLAGS, add_setting_flags, predictor_from
from vitserve.client import ClientError
from vitserve.documents import Classification

CIFAR10_HOME: Final = "https://www.cs.toronto.edu/~kriz/cifar.html"

_SURE: Final = 0.9
"""A best score above it reads as certainty."""

_CONCURRENCY: Final = 32
"""Requests under way at a server."""


@dataclass(frozen=True)
class _Model:
    """A model that answers here or at a server.

    Attributes:
        name: what it is called.
        labels: of its classes.
        has_sets: whether it has a coverage.
        answer: takes pictures; returns scores, float32 [N, K], and members of sets, bool [N, K], in class order.
    """

    name: str
    labels: tuple[str, ...]
    has_sets: bool
    answer: Callable[[PictureFiles], tuple[NDArray[np.float32], NDArray[np.bool_]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve evaluate`."""
    pictures = parser.add_mutually_exclusive_group(required=True)
    pictures.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"CIFAR-10's binary files (from {CIFAR10_HOME}), or one folder of pictures a class",
    )
    pictures.add_argument(
        "--unknown",
        type=Path,
        nargs="+",
        metavar="FILE|FOLDER",
        help="pictures of none of the model's classes: measure how sure it is of them all the same",
    )
    add_server_flags(parser)
    parser.add_argument(
        "--robustness",
        action="store_true",
        help="measure CIFAR-10's images as users send them, too: enlarged JPEGs, turned by Exif, greyscale",
    )
    add_setting_flags(parser, (*MODEL_FLAGS, "coverage"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the result."""
    measure = _measure_known if arguments.unknown is None else _measure_unknown
    measure(arguments)
    return 0


def _measure_known(arguments: argparse.Namespace) -> None:
    if not arguments.data.is_dir():
        raise InputError(
            "data",
            f"{arguments.data}: no such folder: give one folder of pictures a class, or CIFAR-10's .bin files; "
            f"they are the binary version at {CIFAR10_HOME}, to be unpacked",
        )
    pictures = open_evaluation_set(arguments.data)
    if arguments.robustness and not is_cifar10(arguments.data):
        raise InputError("robustness", f"{arguments.data}: --robustness is for CIFAR-10's binary files")
    with _model_of(arguments) as model:
        truth = pictures.truth(model.labels, model.name)
        scores, members = model.answer(pictures.files)
        _print(model, pictures, scores, truth)
        if model.has_sets:
            sets = MeasuredSets.of(members, truth)
            print(  # noqa: T201
                f"sets: {sets.covered:.2%} hold the right label, {sets.labels:.2f} labels on average, "
                f"{sets.abstained:.2%} abstained"
            )
        if arguments.robustness:
            _print_robustness(model, pictures.files, truth)


def _measure_unknown(arguments: argparse.Namespace) -> None:
    if arguments.robustness:
        raise InputError("robustness", "--robustness is not for --unknown")
    files = find_images(arguments.unknown)
    with _model_of(arguments) as model:
        scores, members = model.answer(PictureFiles.of(files, np.zeros(len(files), np.int64)))
    best = scores.max(axis=1)
    abstained = f"; {(~members.any(axis=1)).mean():.1%} abstained" if model.has_sets else ""
    print(  # noqa: T201
        f"{len(files)} pictures of none of its classes: the best score is {best.mean():.1%} on average, and above "
        f"{_SURE:.0%} for {(best > _SURE).mean():.1%}{abstained}"
    )


@contextmanager
def _model_of(arguments: argparse.Namespace) -> Iterator[_Model]:
    """Give the model at --url, or else the one that the settings describe."""
    if arguments.url is None:
        yield _model_here(arguments)
        return
    with client_of(arguments) as client, ThreadPoolExecutor(_CONCURRENCY) as pool:
        labels = tuple(client.labels())

        def ask(picture: tuple[str, bytes]) -> Classification:
            try:
                return client.classify(picture[1], top_k=len(labels))
            except ClientError as error:
                raise InputError("url", f"{arguments.url}: {picture[0]}: {error}") from error

        def answer(files: PictureFiles) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
            scores = np.empty((len(files), len(labels)), np.float32)
            members = np.zeros(scores.shape, np.bool_)
            pictures = ((files.name(number), files.read(number)) for number in range(len(files)))
            answers = tqdm(pool.map(ask, pictures), total=len(files), desc="evaluate", unit="img", disable=None)
            for row, each in enumerate(answers):
                order = [prediction.index for prediction in each.predictions]
                scores[row, order] = [prediction.score for prediction in each.predictions]
                members[row, order[: each.set_size or 0]] = True  # a set is the best labels
            return scores, members

        # What it answers has sets where the server has a coverage.
        yield _Model(f"the server at {arguments.url}", labels, client.model().coverage is not None, answer)


def _model_here(arguments: argparse.Namespace) -> _Model:
    from model.evaluation.evaluate import outputs_of_files, scores_and_members  # noqa: PLC0415  torch takes seconds

    predictor, info, _ = predictor_from(arguments)
    require_classes(info.config)
    requested = RequestedOutputs(len(info.labels), label_set=info.coverage is not None)

    def answer(files: PictureFiles) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        return scores_and_members(outputs_of_files(predictor, files, requested), len(files), len(info.labels))

    name = f"{info.name} on {info.device} in {info.dtype}"
    return _Model(name, info.labels, info.coverage is not None, answer)


def _print(model: _Model, pictures: EvaluationSet, scores: NDArray[np.float32], truth: NDArray[np.int64]) -> None:
    from model.evaluation.evaluate import measure  # noqa: PLC0415  torch takes seconds to import

    evaluation = measure(scores, truth, model.labels)
    kind = f"{pictures.split} images" if pictures.split else "images"
    print(f"{model.name}: {evaluation.accuracy:.2%} of {evaluation.count} {kind} right")  # noqa: T201
    print(f"loss {evaluation.loss:.4f} nats, expected calibration error {evaluation.calibration_error:.2%}")  # noqa: T201
    width = max(12, *(len(label) for label in evaluation.per_class))
    for label, accuracy in evaluation.per_class.items():
        print(f"  {label:{width}} {accuracy:.1%}")  # noqa: T201


def _print_robustness(model: _Model, files: PictureFiles, truth: NDArray[np.int64]) -> None:
    """Print the accuracy on the pictures as users send them, and its distance from that on the pictures as they are."""
    from model.evaluation.as_sent import as_sent  # noqa: PLC0415  torch takes seconds to import

    variants = as_sent(files)
    width, first = max(map(len, variants)), None
    print("as users send them, through the service's own preprocessing:")  # noqa: T201
    for name, variant in variants.items():
        accuracy = float((model.answer(variant)[0].argmax(axis=1) == truth).mean())
        first = accuracy if first is None else first
        print(f"  {name:{width}}  {accuracy:.2%}  {100 * (accuracy - first):+.2f} points")  # noqa: T201
