"""Calibration from labelled pictures: the scores' fit, and the quality of sets."""

import numpy as np
import pytest

from model.calibration import MAX_PICTURES, Fit
from model.errors import DatasetError
from model.extensions.evaluation.calibration import MeasuredSets, calibrate, calibration_of
from model.extensions.taught.score_fit import FORMS
from tests.model.calibrated import calibrated_logits


def test_scores_are_fitted_to_a_fifth() -> None:
    logits, labels = calibrated_logits(1000)
    calibration, fitted, form, before, after, measured = calibrate(
        2 * logits, labels, Fit(9.0), "made", (0.95, 0.9, 0.999)
    )
    assert (fitted, form) == (200, FORMS[0])
    assert before.loss - after.loss > 0.3
    assert after.error < 0.07
    assert before.error > 0.15
    assert calibration.temperature == pytest.approx(2, rel=0.3)
    assert (calibration.pictures, len(calibration.scores)) == (1000, 800)
    assert list(measured) == [0.9, 0.95]  # 1,999 pictures are needed for the third
    assert [sets.covered for sets in measured.values()] == pytest.approx([0.91, 0.955], abs=0.015)
    assert measured[0.9].abstained == pytest.approx(0.05, abs=0.01)
    assert 1 < measured[0.9].labels < measured[0.95].labels < 5
    members = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=np.bool_)
    assert MeasuredSets.of(members, np.array([1, 0, 1, 2])) == MeasuredSets(0.5, 1.0, 0.25)


def test_few_pictures_keep_the_temperature() -> None:
    logits, labels = calibrated_logits(39)
    found = calibrate(logits, labels, Fit(1.25), "made", (0.95,))
    assert (found.calibration.temperature, found.fitted, found.form) == (1.25, 0, "")
    assert len(found.calibration.scores) == 39
    with pytest.raises(
        DatasetError, match=r"^made: 38 pictures .* 0.95: 39 are enough, and these for 0.94 \(--cov"
    ):
        calibrate(logits[:38], labels[:38], Fit(1.25), "made", (0.95,))


def test_a_calibration_keeps_pictures_of_all_classes() -> None:
    truth = np.repeat([0, 1], MAX_PICTURES)
    logits = np.zeros((len(truth), 2), np.float32)
    logits[: len(truth) // 2, 0] = 5
    kept = calibration_of("pictures", logits, truth, Fit(1.0)).scores
    assert len(kept) == MAX_PICTURES
    assert np.count_nonzero(np.array(kept) < 0.9) == MAX_PICTURES // 2
