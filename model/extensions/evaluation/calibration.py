"""Calibrate a checkpoint on labelled pictures, and measure its scores and sets of labels."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from model.calibration import (
    MAX_PICTURES,
    Calibration,
    Fit,
    LabelSets,
    pictures_needed,
    scores_and_energies,
)
from model.errors import DatasetError
from model.extensions.taught.score_fit import MIN_PICTURES, choose_fit, losses, spread_rows

# Number of random halvings of the pictures that measure sets of labels.
_HALVINGS: Final = 20


class MeasuredSets(NamedTuple):
    """Sets of labels, measured on labelled pictures that they were not calibrated on.

    Attributes:
        covered: share of the pictures whose set includes the right label.
        labels: mean number of labels in a set.
        abstained: share of the pictures whose set is empty.
    """

    covered: float
    labels: float
    abstained: float

    @classmethod
    def of(cls, members: NDArray[np.bool_], truth: NDArray[np.int64]) -> Self:
        """Measure sets, bool [N, K], of pictures of these classes, [N]."""
        sizes = members.sum(axis=1)
        covered = members[np.arange(len(truth)), truth]
        return cls(float(covered.mean()), float(sizes.mean()), float((sizes == 0).mean()))


def require_pictures(count: int, coverage: float, data: str) -> None:
    """Raise `DatasetError` unless the number of pictures is enough for a coverage."""
    needed = pictures_needed(coverage)
    if count >= needed:
        return
    alternative = ""
    if count > 2:
        possible = math.floor(100 * (count - 1) / (count + 1)) / 100
        alternative = f", and these for {possible:g}"
    raise DatasetError(
        f"{data}: {count} pictures are too few for a coverage of {coverage:g}: "
        f"{needed} are enough{alternative} (--coverage)"
    )


class MeasuredScores(NamedTuple):
    """Quality of the scores of labelled pictures that they were not fitted to.

    Attributes:
        loss: mean negative log-likelihood of the right class, in nats.
        error: see `calibration_error`.
    """

    loss: float
    error: float

    @classmethod
    def of(cls, logits: NDArray[np.float32], truth: NDArray[np.int64], fit: Fit) -> Self:
        """Measure the logits [N, K] of pictures of these classes, [N]."""
        confidence = scores_and_energies(logits, *fit)[0].max(axis=1)
        error = calibration_error(confidence.astype(np.float32), logits.argmax(axis=1) == truth)
        return cls(float(losses(logits, truth, fit).mean()), error)


def calibration_error(
    confidence: NDArray[np.float32], correct: NDArray[np.bool_], *, bins: int = 15
) -> float:
    """Return the expected calibration error (Guo et al. 2017); 0 is perfect.

    It is the mean gap between confidence and accuracy over bins of equal width, (lower, upper],
    weighted by their images. See https://arxiv.org/abs/1706.04599.

    Args:
        confidence: [N], the top-1 score of each image, 0...1.
        correct: [N], whether the top-1 class is right.
        bins: number of bins.
    """
    exact = confidence.astype(np.float64)
    bin_of = np.clip(np.ceil(exact * bins).astype(np.int64) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=correct - exact, minlength=bins)
    return float(np.abs(gaps).sum() / len(correct))


class Calibrated(NamedTuple):
    """The result of `calibrate`.

    Attributes:
        calibration: the content of `calibration.json`.
        fitted: number of pictures that the scores were fitted to.
        form: a name of `FORMS`; empty if the scores did not change.
        before, after: quality of the scores of the other pictures.
        sets: measured sets of labels, by coverage.
    """

    calibration: Calibration
    fitted: int
    form: str
    before: MeasuredScores
    after: MeasuredScores
    sets: dict[float, MeasuredSets]


def pictures_to_fit(coverage: float) -> int:
    """Return the fewest pictures whose fifth fits scores, while the others reach a coverage."""
    return max(5 * MIN_PICTURES, 5 * (pictures_needed(coverage) - 1) // 4 + 1)


def calibrate(
    logits: NDArray[np.float32],
    truth: NDArray[np.int64],
    fit: Fit,
    data: str,
    coverages: Sequence[float],
    *,
    seed: int = 0,
) -> Calibrated:
    """Return a calibration, and measure its scores and sets.

    The scores are fitted to a random fifth, if it has enough pictures and some errors. The other
    pictures calibrate the sets, so that they relate to the fitted scores like all future pictures.
    Sets are measured on random halvings of them: one half calibrates, the other is measured.

    Args:
        logits: logits of pictures that the model was not trained on, [N, K].
        truth: their classes, int64 [N].
        fit: the checkpoint's fit, which stays if there are too few pictures for a new one.
        data: name of the pictures.
        coverages: the pictures must be enough for the first. Others are measured if half of the
            pictures is enough.
        seed: seed of the random split.

    Raises:
        DatasetError: there are too few pictures.
    """
    require_pictures(len(truth), coverages[0], data)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(truth))
    fitted, rest = np.split(order, [len(order) // 5])
    is_enough = len(truth) >= pictures_to_fit(coverages[0])
    if is_enough and bool((logits[fitted].argmax(axis=1) != truth[fitted]).any()):
        new_fit, form = choose_fit(logits[fitted], truth[fitted], fit)
    else:
        fitted = order[:0]
        rest = order
        new_fit = fit
        form = ""
    logits = logits[rest]
    truth = truth[rest]
    scores, energies = scores_and_energies(logits, *new_fit)
    measured: dict[float, MeasuredSets] = {}
    for coverage in sorted(coverages):
        if pictures_needed(coverage) <= len(rest) // 2:
            measured[coverage] = _measured_sets(
                scores, energies, truth, coverage, new_fit.temperature, generator
            )
    return Calibrated(
        calibration_of(data, logits, truth, new_fit, fitted=len(fitted)),
        len(fitted),
        form,
        MeasuredScores.of(logits, truth, fit),
        MeasuredScores.of(logits, truth, new_fit),
        measured,
    )


def _measured_sets(
    scores: NDArray[np.float64],
    energies: NDArray[np.float64],
    truth: NDArray[np.int64],
    coverage: float,
    temperature: float,
    generator: np.random.Generator,
) -> MeasuredSets:
    """Return the mean measurement of sets over random halvings of the pictures."""
    runs: list[MeasuredSets] = []
    for _ in range(_HALVINGS):
        some, others = np.split(generator.permutation(len(truth)), [len(truth) // 2])
        right_scores = np.sort(scores[some, truth[some]]).tolist()
        label_sets = LabelSets.of(
            temperature, right_scores, np.sort(energies[some]).tolist(), coverage
        )
        members = label_sets.members(scores[others], energies[others])
        runs.append(MeasuredSets.of(members, truth[others]))
    return MeasuredSets(*np.mean(runs, axis=0).tolist())


def calibration_of(
    data: str, logits: NDArray[np.float32], truth: NDArray[np.int64], fit: Fit, *, fitted: int = 0
) -> Calibration:
    """Return the calibration of labelled pictures; it keeps at most `MAX_PICTURES`.

    Args:
        data: name of the pictures.
        logits: logits of pictures that the model was not trained on, [N, K].
        truth: their classes, int64 [N].
        fit: fit of the scores.
        fitted: number of further pictures that the scores were fitted to.
    """
    rows = spread_rows(len(truth), MAX_PICTURES)
    scores, energies = scores_and_energies(logits[rows], *fit)
    right = scores[np.arange(len(rows)), truth[rows]]
    return Calibration.of(data, len(truth) + fitted, fit, right, energies)
