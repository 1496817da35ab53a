from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from model.calibration import calibration_error
from model.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.data import cifar10
from model.data.datasets import open_evaluation_set
from model.errors import DatasetError
from model.evaluation.evaluate import Evaluation, measure
from model.network.vit import VisionTransformer
from model.outputs import Outputs, RequestedOutputs
from model.runtime.backend import Images
from model.runtime.predictor import Predictor
from tests.model.data.picture_folders import write_folder
from tests.model.evaluation.scores import predict_scores
from tests.model.training.synthetic import LABELS


def make_checkpoint(size: int = 32, labels: tuple[str, ...] = LABELS) -> Checkpoint:
    config = ViTConfig(
        image_size=(size, size), patch_size=8, width=8, depth=1, heads=1, mlp_width=8, num_classes=len(labels)
    )
    preprocess = PreprocessConfig(
        size=(size, size),
        resize="squash",
        resize_size=(size, size),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )
    tensors = VisionTransformer(config).state_dict()
    return Checkpoint("m", "m", "vitserve", "vit", config, preprocess, labels, tensors)


class FirstPixelPredictor(Predictor):
    """Says that an image's class is what its first red value says, as sure as the first green value says in percent."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.max_batch = checkpoint, 7

    def predict(self, images: Images, requests: RequestedOutputs | Sequence[RequestedOutputs]) -> list[Outputs]:
        assert isinstance(images, np.ndarray)
        assert isinstance(requests, RequestedOutputs)
        count, classes = len(images), len(self.checkpoint.labels)
        assert images.dtype == np.uint8
        assert images.shape[1:] == (32, 32, 3)
        assert 1 <= count <= self.max_batch
        sure = images[:, 0, 0, 1:2] / 100
        scores = np.repeat((1 - sure) / (classes - 1), classes, axis=1)
        np.put_along_axis(scores, images[:, 0, 0, :1].astype(np.int64), sure, axis=1)
        order = np.argsort(-scores, axis=1)[:, : requests.top_k]
        best = np.take_along_axis(scores, order, axis=1).astype(np.float32)
        return list(map(Outputs, best, order))


def evaluate_cifar10(predictor: Predictor, data: Path) -> Evaluation:
    pictures = open_evaluation_set(data)
    labels = predictor.checkpoint.labels
    truth = pictures.truth(labels, predictor.checkpoint.name)
    return measure(predict_scores(predictor, pictures.files), truth, labels)


def write_test_images(folder: Path, truth: list[int], said: list[int], percent: list[int]) -> None:
    records = np.zeros((len(truth), 3073), dtype=np.uint8)
    records[:, 0], records[:, 1], records[:, 1 + 1024] = truth, said, percent
    records.tofile(folder / "test_batch.bin")


def test_accuracy_per_class_loss_and_calibration_of_known_answers(cifar: Path) -> None:
    write_test_images(cifar, truth=[0, 0, 0, 9, 9], said=[0, 0, 1, 9, 9], percent=[70, 70, 70, 95, 95])
    found = evaluate_cifar10(FirstPixelPredictor(make_checkpoint()), cifar)
    assert found.count == 5
    assert found.accuracy == pytest.approx(4 / 5)
    assert found.per_class == {"airplane": pytest.approx(2 / 3), "truck": 1.0}
    assert found.loss == pytest.approx(-np.log([0.7, 0.7, 0.3 / 9, 0.95, 0.95]).mean(), rel=1e-5)
    assert found.calibration_error == pytest.approx((abs(2 - 2.1) + abs(2 - 1.9)) / 5, abs=1e-6)
    assert np.sum(found.confusion) == 5
    assert (found.confusion[0][:2], found.confusion[9][9]) == ((2, 1), 2)
    assert "confusion" not in found.record()


def test_every_image_keeps_its_own_scores_across_batches(cifar: Path) -> None:
    said = [n % 10 for n in range(23)]  # three full batches of seven and a rest
    write_test_images(cifar, truth=said, said=said, percent=[50 + n for n in range(23)])
    scores = predict_scores(FirstPixelPredictor(make_checkpoint()), cifar10.read(cifar, cifar10.TEST_FILES).pixels)
    assert scores.argmax(axis=1).tolist() == said
    np.testing.assert_allclose(scores.max(axis=1), [(50 + n) / 100 for n in range(23)], rtol=1e-6)
    np.testing.assert_allclose(scores.sum(axis=1), 1, rtol=1e-5)


def test_a_model_of_other_classes_is_refused(cifar: Path) -> None:
    checkpoint = make_checkpoint(labels=(*LABELS[1:], "submarine"))
    with pytest.raises(DatasetError, match="not those of the model m"):
        evaluate_cifar10(FirstPixelPredictor(checkpoint), cifar)


def test_an_underflowed_score_of_the_right_class_costs_a_finite_loss() -> None:
    scores = np.array([[1.0, 0.0]], dtype=np.float32)
    found = measure(scores, np.array([1]), ("a", "b"))
    assert np.isfinite(found.loss)
    assert found.loss > 80


def test_measuring_nothing_is_refused() -> None:
    with pytest.raises(DatasetError, match="no images"):
        measure(np.empty((0, 2), dtype=np.float32), np.empty(0, dtype=np.int64), ("a", "b"))


@pytest.mark.parametrize(
    ("confidence", "correct", "bins", "error"),
    [
        ([0.9, 0.9, 0.5, 0.5], [True, False, True, True], 10, 0.45),  # gaps of 0.4 and 0.5
        ([0.85, 0.95], [True, False], 5, 0.4),  # within a bin gaps cancel
        ([0.85, 0.95], [True, False], 10, 0.55),
        ([0.5, 0.75, 0.75, 0.75, 0.75], [True, True, True, True, False], 2, 0.1),  # an upper edge is of the bin below
    ],
)
def test_calibration_error_of_known_cases(
    confidence: list[float], correct: list[bool], bins: int, error: float
) -> None:
    found = calibration_error(np.array(confidence, np.float32), np.array(correct), bins=bins)
    assert found == pytest.approx(error, abs=1e-6)


def test_a_folder_is_measured_on_its_test_set_or_else_its_validation_set_or_all(tmp_path: Path) -> None:
    for name, count in (("train", 4), ("val", 3), ("test", 2)):
        write_folder(tmp_path / name, count)
    for split, count in (("test", 6), ("validation", 9), ("", 12)):
        found = open_evaluation_set(tmp_path)
        assert (found.split, len(found.files), found.names) == (split, count, ("blue", "green", "red"))
        for name in {"test": ["test"], "validation": ["val"], "": []}[split]:
            shutil.rmtree(tmp_path / name)
    assert found.truth(("red", "x", "green", "blue"), "m").tolist() == [3] * 4 + [2] * 4 + [0] * 4
    bad = tmp_path / "train" / "blue" / "000.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(DatasetError, match=r"000\.png: "):
        predict_scores(FirstPixelPredictor(make_checkpoint()), open_evaluation_set(tmp_path).files)
