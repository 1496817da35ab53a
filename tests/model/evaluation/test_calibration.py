from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from model.errors import DatasetError
from model.evaluation.calibration import (
    TEMPERATURE_RANGE,
    MeasuredSets,
    calibrate,
    confidence_bins,
    expected_calibration_error,
    fit_temperature,
)


def calibrated_logits(count: int = 4000, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels drawn from softmax(logits): the right temperature is 1 by construction."""
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(count, classes, generator=generator)
    labels = torch.multinomial(logits.softmax(dim=1), 1, generator=generator).squeeze(1)
    return logits, labels


@pytest.mark.parametrize("truth", [0.4, 1.0, 3.0])
def test_the_fitted_temperature_undoes_over_and_underconfidence(truth: float) -> None:
    logits, labels = calibrated_logits()
    assert fit_temperature(logits * truth, labels) == pytest.approx(truth, rel=0.06)


def test_no_other_temperature_makes_the_labels_likelier() -> None:
    logits, labels = calibrated_logits()
    logits = 2.5 * logits.double()
    best = fit_temperature(logits, labels)
    least = F.cross_entropy(logits / best, labels)
    assert least < F.cross_entropy(logits, labels)
    factors = (0.1, 0.5, 0.9, 0.99, 1.01, 1.1, 2.0, 6.0)
    assert all(least <= F.cross_entropy(logits / (best * factor), labels) for factor in factors)


def test_logits_without_an_error_give_a_finite_temperature_within_range() -> None:
    labels = torch.arange(5).repeat(20)
    temperature = fit_temperature(10 * F.one_hot(labels, 5).float(), labels)
    assert TEMPERATURE_RANGE[0] * 0.999 <= temperature <= TEMPERATURE_RANGE[1]
    assert math.isfinite(temperature)


def error(confidence: NDArray[np.float32], correct: NDArray[np.bool_], bins: int = 15) -> float:
    return expected_calibration_error(confidence_bins(confidence, correct, bins=bins))


def test_calibration_error_of_a_known_case() -> None:
    # Two bins of two: (0.9, 0.9) with accuracy 0.5, gap 0.4; (0.5, 0.5) with accuracy 1, gap 0.5.
    confidence = np.array([0.9, 0.9, 0.5, 0.5], dtype=np.float32)
    correct = np.array([True, False, True, True])
    assert error(confidence, correct, bins=10) == pytest.approx(0.45, abs=1e-6)


def test_bins_tell_images_confidence_and_accuracy() -> None:
    confidence = np.array([1.0, 0.875, 0.625, 0.5, 0.375], dtype=np.float32)
    bins = confidence_bins(confidence, np.array([True, False, True, True, False]), bins=4)
    assert [one.count for one in bins] == [0, 2, 1, 2]  # an upper edge belongs to the bin below it
    assert [one.accuracy for one in bins] == [0, 0.5, 1, 0.5]
    assert [one.confidence for one in bins] == [0, 0.4375, 0.625, 0.9375]


def test_calibration_error_is_nothing_when_confidence_is_right() -> None:
    confidence = np.full(100, 0.75, dtype=np.float32)
    correct = np.arange(100) < 75
    assert error(confidence, correct) == pytest.approx(0.0, abs=1e-6)


def test_gaps_that_cancel_within_a_bin_do_not_count_but_across_bins_they_do() -> None:
    confidence = np.array([0.85, 0.95], dtype=np.float32)
    correct = np.array([True, False])
    assert error(confidence, correct, bins=5) == pytest.approx(0.4, abs=1e-6)
    assert error(confidence, correct, bins=10) == pytest.approx(0.55, abs=1e-6)


def test_a_calibration_fits_the_temperature_to_a_fifth_and_measures_sets_on_the_rest() -> None:
    logits, labels = calibrated_logits(1000)
    calibration, fitted, measured = calibrate(
        2 * logits.numpy(), labels.numpy(), 9.0, "made", 0.95, coverages=(0.9, 0.95, 0.999)
    )
    assert fitted == 200
    assert calibration.temperature == pytest.approx(2, rel=0.3)
    assert (calibration.pictures, len(calibration.scores)) == (1000, 800)
    assert list(measured) == [0.9, 0.95]  # 1,999 pictures are needed for the third
    assert [sets.covered for sets in measured.values()] == pytest.approx([0.91, 0.955], abs=0.015)
    assert measured[0.9].abstained == pytest.approx(0.05, abs=0.01)
    assert 1 < measured[0.9].labels < measured[0.95].labels < 5


def test_few_pictures_leave_the_temperature_and_fewer_are_refused_with_what_is_enough() -> None:
    logits, labels = (part.numpy() for part in calibrated_logits(39))
    calibration, fitted, _ = calibrate(logits, labels, 1.25, "made", 0.95)
    assert (calibration.temperature, fitted, len(calibration.scores)) == (1.25, 0, 39)
    with pytest.raises(DatasetError, match=r"^made: 38 pictures .* 0.95: 39 are enough, and these for 0.94 \(--cov"):
        calibrate(logits[:38], labels[:38], 1.25, "made", 0.95)


def test_sets_are_measured_by_hand() -> None:
    members = np.array([[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0]], dtype=np.bool_)
    assert MeasuredSets.of(members, np.array([1, 0, 1, 2])) == MeasuredSets(0.5, 1.0, 0.25)
