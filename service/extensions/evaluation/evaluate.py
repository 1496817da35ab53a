"""`vitserve evaluate`: accuracy and calibration error on labelled pictures; of pictures of no
class, how sure it is.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from model.extensions.datasets.pictures import PictureFiles
from model.extensions.datasets.split_record import SplitRecord, digests_of
from model.extensions.evaluation.calibration import MeasuredSets
from model.extensions.evaluation.datasets import open_evaluation_set
from model.images.listing import listed
from model.parameters import require_classes
from service.cli.image_files import find_images, print_notes, require_class_folders
from service.cli.setting_flags import (
    CHECKPOINT_FLAGS,
    add_checkpoint,
    add_setting_flags,
    predictor_from,
)
from service.engine.messages import ModelInfo

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor

CIFAR10_HOME: Final = "https://www.cs.toronto.edu/~kriz/cifar.html"

# A best score above it reads as certainty.
_SURE: Final = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `vitserve evaluate`."""
    add_checkpoint(parser)
    pictures = parser.add_mutually_exclusive_group(required=True)
    pictures.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="folder with one subfolder of pictures per class, or CIFAR-10's binary version "
        f"({CIFAR10_HOME})",
    )
    pictures.add_argument(
        "--unknown",
        type=Path,
        nargs="+",
        metavar="FILE|FOLDER",
        help="pictures of none of the model's classes: measure how sure it is of them all the same",
    )
    add_setting_flags(parser, (*CHECKPOINT_FLAGS, "device", "dtype", "coverage"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, and print the result."""
    if arguments.data is None:
        _measure_certainty(arguments)
    else:
        _measure_accuracy(arguments)
    return 0


def _measure_certainty(arguments: argparse.Namespace) -> None:
    """Print how sure the model is of pictures of none of its classes."""
    paths = find_images(arguments.unknown)
    files = PictureFiles.of(paths, np.zeros(len(paths), np.int64))
    predictor, info, _ = predictor_from(arguments)
    require_classes(info.config)
    scores, members = _scores_and_members(predictor, info, files)
    best = scores.max(axis=1)
    abstained = ""
    if info.coverage is not None:
        abstained = f"; {(~members.any(axis=1)).mean():.1%} abstained"
    print(
        f"{len(files)} pictures of none of its classes: the best score is {best.mean():.1%} "
        f"on average, and above {_SURE:.0%} for {(best > _SURE).mean():.1%}{abstained}"
    )


def _measure_accuracy(arguments: argparse.Namespace) -> None:
    """Print the accuracy and the calibration error on labelled pictures."""
    require_class_folders(arguments.data)
    labelled = open_evaluation_set(arguments.data)
    print_notes(labelled.notes)
    from model.extensions.evaluation.evaluate import measure  # noqa: PLC0415  torch is slow

    predictor, info, settings = predictor_from(arguments)
    require_classes(info.config)
    truth = labelled.truth(info.labels, info.name)
    scores, members = _scores_and_members(predictor, info, labelled.files)
    result = measure(scores, truth, info.labels)
    images = f"{result.count} {labelled.split} images".replace("  ", " ")
    print(f"{info.name} on {info.device} in {info.dtype}: {result.accuracy:.2%} of {images} right")
    print(f"loss {result.loss:.4f} nats, expected calibration error {result.calibration_error:.2%}")
    _print_trained_on(labelled.files, settings.checkpoint)
    width = max(12, *(len(label) for label in result.per_class))
    for label, accuracy in result.per_class.items():
        print(f"  {label:{width}} {accuracy:.1%}")
    absent = [label for label in info.labels if label not in result.per_class]
    if absent:
        print(f"no pictures of {len(absent)} of {len(info.labels)} classes: {listed(absent)}")
    if info.coverage is not None:
        sets = MeasuredSets.of(members, truth)
        print(
            f"sets for a coverage of {info.coverage:g}: {sets.covered:.2%} hold the right label, "
            f"{sets.labels:.2f} labels on average, {sets.abstained:.2%} abstained"
        )


def _scores_and_members(
    predictor: "Predictor", info: ModelInfo, files: PictureFiles
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the score of each class for each picture, and whether the label set has it."""
    from model.extensions.evaluation.evaluate import scores_and_members  # noqa: PLC0415  torch is slow

    return scores_and_members(
        predictor, files, len(info.labels), label_set=info.coverage is not None
    )


def _print_trained_on(files: PictureFiles, checkpoint: str) -> None:
    """Print how many of the pictures the checkpoint was trained on, if any."""
    record = SplitRecord.read(checkpoint)
    if record is None:
        return
    count = int(record.trained_on(digests_of(files)).sum())
    if count:
        print(
            f"{count} of these {len(files)} pictures were trained on: "
            "new pictures are answered worse"
        )
