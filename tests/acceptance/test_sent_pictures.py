"""The bundled model on pictures as users send them: the first test images of CIFAR-10, through the service's own
preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from model.checkpoint import load_checkpoint
from model.data.datasets import open_evaluation_set
from model.data.pictures import PictureFiles
from model.runtime.predictor import Predictor
from tests.acceptance.as_sent import as_sent
from tests.model.evaluation.scores import predict_scores

pytestmark = pytest.mark.timeout(400)  # two thousand pictures are made, sent and answered before the first test

COUNT = 500
PROMISED = 0.015
"""Accuracy that enlarging, compressing and turning may cost, on all test images."""


@pytest.fixture(scope="module")
def pictures(shared: Path) -> PictureFiles:
    return open_evaluation_set(shared / "data" / "cifar-10-batches-bin").files.take(np.arange(COUNT))


@pytest.fixture(scope="module")
def answers(pictures: PictureFiles) -> dict[str, NDArray[np.int64]]:
    """The class that each variant of each picture is answered with."""
    predictor = Predictor(load_checkpoint("bundled"), device="cpu", dtype="float32", compile_mode="off")
    return {
        name.rpartition(", ")[2]: predict_scores(predictor, variant).argmax(axis=1)
        for name, variant in as_sent(pictures).items()
    }


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["JPEG 85", "turned by Exif"])
def test_a_picture_is_answered_alike_when_it_is_enlarged_compressed_and_turned(
    variant: str, answers: dict[str, NDArray[np.int64]], pictures: PictureFiles
) -> None:
    truth = pictures.labels
    right = answers["as stored"] == truth
    right_as_sent = answers[variant] == truth
    lost = right.mean() - right_as_sent.mean()
    # Five hundred images stand for all ten thousand. Only those whose answer changes can move the difference, each by
    # one: two standard errors of a sum of so many signs come on top of what is promised for all of them.
    changed = (right != right_as_sent).sum()
    assert lost < PROMISED + 2 * changed**0.5 / COUNT
    assert changed < 0.1 * COUNT


@pytest.mark.shared
@pytest.mark.slow
def test_turning_by_exif_changes_almost_no_answer(answers: dict[str, NDArray[np.int64]]) -> None:
    # The same pixels, compressed in another direction.
    assert (answers["turned by Exif"] == answers["JPEG 85"]).mean() > 0.98


@pytest.mark.shared
@pytest.mark.slow
def test_a_picture_without_colour_is_still_answered_well(
    answers: dict[str, NDArray[np.int64]], pictures: PictureFiles, record_property: Callable[[str, object], None]
) -> None:
    truth = pictures.labels
    accuracy = float((answers["greyscale"] == truth).mean())
    record_property("greyscale_accuracy", accuracy)
    assert accuracy > 0.5  # five times what guessing gives
