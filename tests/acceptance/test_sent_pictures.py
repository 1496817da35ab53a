"""The bundled model on pictures as users send them: the first test images of CIFAR-10, through the service's own
preprocessing."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from model.checkpoint import load_checkpoint
from model.data.datasets import open_evaluation_set
from model.data.pictures import PictureFiles
from model.runtime.predictor import Predictor
from tests.model.evaluation.scores import predict_scores
from tests.model.images.pictures import encode

pytestmark = pytest.mark.timeout(400)  # fifteen hundred pictures are made and answered before the first test

COUNT = 500
SIDE = 512
"""Of the pictures that are sent, in pixels."""
STORED_AS = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
"""How a camera stores an upright picture, by Exif orientation (6: to be turned clockwise by 90 degrees)."""
PROMISED = 0.015
"""Accuracy that enlarging, compressing and turning may cost, on all test images."""


@pytest.fixture(scope="module")
def pictures(shared: Path) -> PictureFiles:
    return open_evaluation_set(shared / "data" / "cifar-10-batches-bin").files.take(np.arange(COUNT))


def as_sent(files: PictureFiles, *, turned: bool) -> PictureFiles:
    """Return the same pictures, which are upright, as users send them; `turned`: stored by Exif 3, 6 and 8 in turn."""

    def read(number: int) -> bytes:
        picture = Image.open(io.BytesIO(files.read(number))).convert("RGB")
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        orientation = tuple(STORED_AS)[number % len(STORED_AS)] if turned else None
        stored = picture.transpose(STORED_AS[orientation]) if orientation else picture
        return encode(stored, "JPEG", orientation, quality=85)

    return replace(files, read=read)


@pytest.fixture(scope="module")
def answers(pictures: PictureFiles) -> dict[str, NDArray[np.int64]]:
    """The class that each picture is answered with, by how it is sent."""
    predictor = Predictor(load_checkpoint("bundled"), device="cpu", dtype="float32", compile_mode="off")
    sent = {"as stored": pictures, **{name: as_sent(pictures, turned=name == "turned") for name in ("JPEG", "turned")}}
    return {name: predict_scores(predictor, files).argmax(axis=1) for name, files in sent.items()}


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["JPEG", "turned"])
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
    assert (answers["turned"] == answers["JPEG"]).mean() > 0.98
