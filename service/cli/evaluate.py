"""`vitserve evaluate`: accuracy on labelled pictures, in-process or through a running server; faithfulness of maps.

Of pictures of none of its classes, how sure the model is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from model.errors import InputError
from model.images.preprocess import ModelInput
from model.outputs import Outputs, RequestedOutputs, require_classes
from service.cli import explanations
from service.cli.image_files import find_images, handle_answers, predict_files, writing
from service.cli.server_flags import add_server_flags, client_of, stream_answers
from service.cli.setting_flags import MODEL_FLAGS, add_setting_flags, predictor_from
from vitserve.client import ClientError

if TYPE_CHECKING:
    from model.evaluation.evaluate import Evaluation
    from model.evaluation.evaluation_set import EvaluationSet

CIFAR10_HOME: Final = "https://www.cs.toronto.edu/~kriz/cifar.html"

_SURE: Final = 0.9
"""A best score above it reads as certainty."""

Answers = Iterator[tuple[Path, tuple[float, bool | None] | str]]
"""Each file with its best score, and whether the model abstained, where it has a coverage; or why it has no answer."""

Scorer = Callable[[int, Callable[[int], bytes]], NDArray[np.float32]]
"""Takes the count N of images and a function from number to image file; returns scores [N, K] in class order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve evaluate`."""
    pictures = parser.add_mutually_exclusive_group(required=True)
    pictures.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"CIFAR-10's binary files (from {CIFAR10_HOME}), or one folder a class; --explanations takes any pictures",
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
        "--concurrency", type=int, default=32, metavar="N", help="requests under way with --url (default: %(default)s)"
    )
    parser.add_argument(
        "--robustness",
        action="store_true",
        help="measure CIFAR-10's images as users send them, too: enlarged JPEGs, turned by Exif, greyscale",
    )
    parser.add_argument(
        "--card", type=Path, metavar="FILE", help="write what --robustness finds into this model card, too"
    )
    explanations.add_arguments(parser)
    add_setting_flags(parser, (*MODEL_FLAGS, "coverage"))


def run(arguments: argparse.Namespace) -> int:
    """Measure the accuracy, or how faithful maps are, and print it; return 1 if an image was left out."""
    explanations.check_arguments(arguments)
    if arguments.card is not None and not arguments.robustness:
        raise InputError("card", "--card needs --robustness")
    if arguments.card is not None and not arguments.card.is_file():
        raise InputError("card", f"{arguments.card}: no such file")
    if arguments.unknown is not None:
        return _unknown(arguments)
    if not arguments.data.is_dir():
        raise InputError(
            "data",
            f"{arguments.data}: no such folder: give one folder of pictures a class, or CIFAR-10's .bin files; "
            f"they are the binary version at {CIFAR10_HOME}, to be unpacked",
        )
    if arguments.explanations is not None:
        return explanations.measure_maps(arguments)
    from model.evaluation.evaluation_set import open_evaluation_set  # noqa: PLC0415  torch takes seconds to import

    pictures = open_evaluation_set(arguments.data)
    if arguments.robustness and not pictures.variants:
        raise InputError("robustness", f"{arguments.data}: --robustness is for CIFAR-10's binary files")
    (_through_server if arguments.url else _in_process)(arguments, pictures)
    return 0


def _in_process(arguments: argparse.Namespace, pictures: EvaluationSet) -> None:
    from model.evaluation.calibration import MeasuredSets  # noqa: PLC0415
    from model.evaluation.evaluate import (  # noqa: PLC0415
        measure,
        outputs_of_uploads,
        predict_uploads,
        scores_and_members,
    )

    predictor, info, _ = predictor_from(arguments)
    require_classes(info.config)
    truth = pictures.truth(info.labels, info.name)
    score = partial(predict_uploads, predictor, name=pictures.name, progress=True)
    requested = RequestedOutputs(len(info.labels), label_set=info.coverage is not None)
    outputs = outputs_of_uploads(
        predictor, requested, len(pictures), pictures.upload, name=pictures.name, progress=True
    )
    scores, members = scores_and_members(outputs, len(pictures), len(info.labels))
    _print(f"{info.name} on {info.device} in {info.dtype}", pictures, measure(scores, truth, info.labels))
    if info.coverage is not None:
        sets = MeasuredSets.of(members, truth)
        print(  # noqa: T201
            f"sets for a coverage of {info.coverage:g}: {sets.covered:.2%} hold the right label, "
            f"{sets.labels:.2f} labels on average, {sets.abstained:.2%} abstained"
        )
    if arguments.robustness:
        _robustness(arguments.card, pictures.variants, score, truth)


def _through_server(arguments: argparse.Namespace, pictures: EvaluationSet) -> None:
    from model.evaluation.evaluate import measure  # noqa: PLC0415

    with client_of(arguments) as client, ThreadPoolExecutor(arguments.concurrency) as pool:
        labels = tuple(client.labels())

        def ask(upload: Callable[[int], bytes], number: int) -> list[float]:
            try:
                predictions = client.classify(upload(number), top_k=len(labels)).predictions
            except ClientError as error:
                raise InputError("url", f"{arguments.url}: {pictures.name(number)}: {error}") from error
            by_index = {prediction.index: prediction.score for prediction in predictions}
            return [by_index[index] for index in range(len(labels))]

        def score(count: int, upload: Callable[[int], bytes]) -> NDArray[np.float32]:
            answers = pool.map(partial(ask, upload), range(count))
            return np.array(list(tqdm(answers, total=count, desc="evaluate", unit="img")), np.float32)

        truth = pictures.truth(labels, arguments.url)
        evaluation = measure(score(len(pictures), pictures.upload), truth, labels)
        _print(f"the server at {arguments.url}", pictures, evaluation)
        if arguments.robustness:
            _robustness(arguments.card, pictures.variants, score, truth)


def _unknown(arguments: argparse.Namespace) -> int:
    """Print how sure the model is of pictures of none of its classes; return 1 if one was left out."""
    if arguments.robustness:
        raise InputError("robustness", "--robustness is not for --unknown")
    files = find_images(arguments.unknown)
    best: list[float] = []
    abstained: list[bool] = []

    def note(_: Path, answer: tuple[float, bool | None]) -> None:
        best.append(answer[0])
        if answer[1] is not None:
            abstained.append(answer[1])

    code = handle_answers(
        (_unknown_by_server if arguments.url else _unknown_here)(arguments, files), len(files), note, "answer"
    )
    if best:
        print(  # noqa: T201
            f"{len(best)} pictures of none of its classes: the best score is {np.mean(best):.1%} on average, and above "
            f"{_SURE:.0%} for {np.mean(np.array(best) > _SURE):.1%}"
            + (f"; {np.mean(abstained):.1%} abstained" if abstained else "")
        )
    return code


def _unknown_here(arguments: argparse.Namespace, files: list[Path]) -> Answers:
    predictor, info, settings = predictor_from(arguments)
    require_classes(info.config)

    def answer(_: Path, __: ModelInput, outputs: list[Outputs]) -> tuple[float, bool | None]:
        labels = outputs[0].label_set
        return float(outputs[0].scores[0]), None if labels is None else not len(labels)

    requested = RequestedOutputs(1, label_set=info.coverage is not None)
    return predict_files(files, [requested], answer, predictor, info, settings)


def _unknown_by_server(arguments: argparse.Namespace, files: list[Path]) -> Answers:
    def ask(file: Path) -> tuple[float, bool | None]:
        answer = client.classify(file, top_k=1)
        return answer.predictions[0].score, None if answer.set_size is None else bool(answer.abstained)

    with client_of(arguments) as client:
        yield from stream_answers(files, client, ask)


def _print(what: str, pictures: EvaluationSet, evaluation: Evaluation) -> None:
    kind = f"{pictures.split} images" if pictures.split else "images"
    print(f"{what}: {evaluation.accuracy:.2%} of {evaluation.count} {kind} right")  # noqa: T201
    print(f"loss {evaluation.loss:.4f} nats, expected calibration error {evaluation.calibration_error:.2%}")  # noqa: T201
    width = max(12, *(len(label) for label in evaluation.per_class))
    for label, accuracy in evaluation.per_class.items():
        print(f"  {label:{width}} {accuracy:.1%}")  # noqa: T201


def _robustness(
    card: Path | None, variants: Mapping[str, Callable[[int], bytes]], score: Scorer, truth: NDArray[np.int64]
) -> None:
    """Print the accuracy of each variant and its distance from the first, and write them into the card."""
    accuracies: dict[str, float] = {}
    width = max(map(len, variants))
    print("as users send them, through the service's own preprocessing:")  # noqa: T201
    for name, upload in variants.items():
        accuracies[name] = float((score(len(truth), upload).argmax(axis=1) == truth).mean())
        points = 100 * (accuracies[name] - next(iter(accuracies.values())))
        print(f"  {name:{width}}  {accuracies[name]:.2%}  {points:+.2f} points")  # noqa: T201
    if card is not None:
        from model.training.report.model_card import with_robustness  # noqa: PLC0415

        with writing(card):
            card.write_text(with_robustness(card.read_text(encoding="utf-8"), accuracies, len(truth)), encoding="utf-8")
