"""Calibrated scores and sets of labels: coverage and finite-sample correction."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from model.calibration import (
    Calibration,
    Fit,
    LabelSets,
    label_sets_of,
    pictures_needed,
    scores_and_energies,
)
from model.errors import CheckpointError

pytestmark = pytest.mark.timeout(60)  # forms are fitted many times


@pytest.mark.parametrize(
    ("coverage", "least"),
    [(0.2, 2), (0.5, 3), (0.8, 9), (0.9, 19), (0.95, 39), (0.99, 199), (0.999, 1999)],
)
def test_too_few_pictures_are_refused(coverage: float, least: int) -> None:
    assert pictures_needed(coverage) == least
    numbers = [number / least for number in range(least)]
    assert (
        LabelSets.of(1.0, numbers, numbers, coverage).least_score == 0
    )  # with the fewest pictures, all must fit
    fewer = Calibration.of(
        "pictures", least, Fit(1.0), np.array(numbers[1:]), np.array(numbers[1:])
    )
    with pytest.raises(
        CheckpointError, match=f"on {least - 1} pictures, too few for .*: {least} are enough$"
    ):
        label_sets_of(fewer, coverage, "m")


@pytest.mark.parametrize(
    ("count", "coverage", "left_out"),
    # (count + 1) (1 - coverage) / 2 pictures may lie below a threshold, in whole ones.
    [
        (39, 0.95, 0),
        (78, 0.95, 0),
        (79, 0.95, 1),
        (118, 0.95, 1),
        (119, 0.95, 2),
        (19, 0.9, 0),
        (999, 0.9, 49),
    ],
)
def test_the_sample_correction_is_exact(count: int, coverage: float, left_out: int) -> None:
    scores = np.linspace(0, 1, count).tolist()
    energies = np.linspace(5, 9, count).tolist()
    sets = LabelSets.of(1.0, scores, energies, coverage)
    assert (sets.least_score, sets.least_energy) == (scores[left_out], energies[left_out])


def drawn(
    generator: np.random.Generator, count: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return logits of an overconfident model, and labels."""
    logits = generator.normal(size=(count, 5)).astype(np.float32)
    truth = np.array([generator.choice(5, p=row) for row in scores_and_energies(logits, 1.0)[0]])
    return (3 * logits + generator.normal(size=(count, 1))).astype(np.float32), truth


@pytest.mark.parametrize(("count", "coverage"), [(39, 0.95), (60, 0.8), (100, 0.9)])
def test_sets_reach_their_coverage(count: int, coverage: float) -> None:
    generator = np.random.default_rng(0)
    held = 0.0
    empty = 0.0
    rounds = 250
    logits, truth = drawn(generator, 6000)
    for _ in range(rounds):
        chosen = generator.permutation(len(truth))
        known = chosen[:count]
        new = chosen[count : count + 200]
        scores, energies = scores_and_energies(logits[known], 1.5)
        right = np.sort(scores[np.arange(count), truth[known]]).tolist()
        sets = LabelSets.of(1.5, right, np.sort(energies).tolist(), coverage)
        members = sets.members(*scores_and_energies(logits[new], 1.5))
        held += members[np.arange(len(new)), truth[new]].mean() / rounds
        empty += (~members.any(axis=1)).mean() / rounds
    # Four standard errors of the mean over calibrations, whose coverage is a beta distribution.
    error = 4 * math.sqrt(coverage * (1 - coverage) / (count * rounds))
    assert held >= coverage - error
    assert empty <= (1 - coverage) / 2 + error


def test_a_label_set_is_best_first() -> None:
    sets = LabelSets(temperature=2.0, least_score=0.1, least_energy=1.5)
    found = sets(np.array([[2, 6, 5, -9], [6, 2, 2, 2], [-4, -4, -4, -4]], np.float32))
    assert [each.tolist() for each in found] == [[1, 2], [0], []]
    assert found[0].dtype == np.int64


def test_non_finite_logits_have_no_set() -> None:
    sets = LabelSets(1.0, 0.1, 0.0)
    assert [len(each) for each in sets(np.array([[np.inf, 1], [np.nan, 1]], np.float32))] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": (0.2, 0.1)}, "ascending"),
        ({"energies": (2.0, 1.0)}, "ascending"),
        ({"scores": (0.1,)}, "1 scores and 2 energies"),
        ({"scores": (0.1, 1.1)}, "less than or equal to 1"),
        ({"energies": (1.0, math.inf)}, "finite"),
        ({"temperature": 0}, "temperature"),
        ({"version": 2}, "version"),
        ({"form": {"power": 0}}, "power"),
        ({"form": {"crowding": math.inf}}, "crowding"),
        ({"more": 1}, "more"),
    ],
)
def test_a_changed_calibration_is_refused(changes: dict[str, object], message: str) -> None:
    written = Calibration.of("pictures", 2, Fit(1.5), np.array([0.9, 0.1]), np.array([3.0, 1.0]))
    assert (written.scores, written.energies) == ((0.1, 0.9), (1.0, 3.0))
    with pytest.raises(ValidationError, match=message):
        Calibration.model_validate(written.model_dump() | changes)
