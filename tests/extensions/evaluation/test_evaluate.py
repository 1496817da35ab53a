import shutil
from pathlib import Path

import numpy as np
import pytest

from model.checkpoint import load_checkpoint
from model.errors import DatasetError
from model.extensions.evaluation.calibration import calibration_error
from model.extensions.evaluation.datasets import open_evaluation_set
from model.extensions.evaluation.evaluate import measure
from model.runtime.predictor import Predictor
from tests.extensions.datasets.picture_folders import write_folder
from tests.extensions.evaluation.scores import predict_scores
from tests.extensions.training.synthetic import LABELS


def test_measures_of_known_answers_are_right() -> None:
    said = [(0, 0.7), (0, 0.7), (1, 0.7), (9, 0.95), (9, 0.95)]
    scores = np.array(
        [[sure if index == best else (1 - sure) / 9 for index in range(10)] for best, sure in said]
    )
    found = measure(scores.astype(np.float32), np.array([0, 0, 0, 9, 9]), LABELS)
    assert found.count == 5
    assert found.accuracy == pytest.approx(4 / 5)
    assert found.per_class == {"airplane": pytest.approx(2 / 3), "truck": 1.0}
    assert found.loss == pytest.approx(-np.log([0.7, 0.7, 0.3 / 9, 0.95, 0.95]).mean(), rel=1e-5)
    assert found.calibration_error == pytest.approx((abs(2 - 2.1) + abs(2 - 1.9)) / 5, abs=1e-6)
    assert np.sum(found.confusion) == 5
    assert (found.confusion[0][:2], found.confusion[9][9]) == ((2, 1), 2)
    assert "confusion" not in found.record()


def test_a_model_of_other_classes_is_refused(cifar: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"not those of the model m, .*: rename the folders .*--labels"
    ):
        open_evaluation_set(cifar).truth((*LABELS[1:], "submarine"), "m")


def test_underflowed_score_has_finite_loss() -> None:
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
        ([0.85, 0.95], [True, False], 5, 0.4),  # gaps cancel within a bin
        ([0.85, 0.95], [True, False], 10, 0.55),
        (
            [0.5, 0.75, 0.75, 0.75, 0.75],
            [True, True, True, True, False],
            2,
            0.1,
        ),  # an upper edge belongs to the bin below
    ],
)
def test_calibration_error_of_known_cases(
    confidence: list[float], correct: list[bool], bins: int, error: float
) -> None:
    found = calibration_error(np.array(confidence, np.float32), np.array(correct), bins=bins)
    assert found == pytest.approx(error, abs=1e-6)


def test_the_test_split_is_measured_first(
    tmp_path: Path,
) -> None:
    root = tmp_path / "splits"
    for name, count in (("train", 4), ("val", 3), ("test", 2)):
        write_folder(root / name, count)
    for split, count in (("test", 6), ("validation", 9)):
        found = open_evaluation_set(root)
        assert (found.split, len(found.files), found.names) == (
            split,
            count,
            ("blue", "green", "red"),
        )
        shutil.rmtree(root / {"test": "test", "validation": "val"}[split])
    with pytest.raises(
        DatasetError,
        match="train/: no test or validation split to measure; to use another split, nam",
    ):
        open_evaluation_set(root)
    root /= "train"
    found = open_evaluation_set(root)
    assert (found.split, len(found.files), found.notes) == ("", 12, ())
    assert found.truth(("red", "x", "green", "blue"), "m").tolist() == [3] * 4 + [2] * 4 + [0] * 4
    bad = root / "blue" / "000.png"
    bad.write_bytes(bad.read_bytes()[:60])
    predictor = Predictor(load_checkpoint("bundled"), device="cpu", compile_mode="off")
    with pytest.raises(DatasetError, match=r"000\.png: "):
        predict_scores(predictor, open_evaluation_set(root).files)
    bad.unlink()
    bad.symlink_to("nowhere")
    with pytest.raises(DatasetError, match=r"000\.png: No such file or directory$"):
        predict_scores(predictor, open_evaluation_set(root).files)
