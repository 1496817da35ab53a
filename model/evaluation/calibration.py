"""Calibration of scores: temperature scaling, expected calibration error, and what sets of labels are made by.

Guo et al. 2017, https://arxiv.org/abs/1706.04599; sets of labels: `model.conformal`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from model.conformal import MAX_PICTURES, Calibration, LabelSets, pictures_needed, scores_and_energies
from model.errors import DatasetError

TEMPERATURE_RANGE: Final = (0.05, 20.0)
"""Range in which a temperature is sought; on data that are answered without an error the best would be 0."""

BINS: Final = 15
"""Number of bins of the expected calibration error, as in the paper."""

MIN_CALIBRATION_IMAGES: Final = 30
"""The fewest images that a temperature is fitted to; from fewer it would be noise."""

MOST_PICTURES: Final = 12_000
"""The most that `calibrate` makes use of."""

_HALVINGS: Final = 20
"""Times that pictures are halved at random to measure sets of labels."""


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature at which the scores make the right labels most likely (Guo et al. 2017, section 4.2).

    Over twenty random halvings of validation sets, of a model that learned labels and of one that learned a teacher's
    answers, this gave a lower calibration error out of sample than the Brier score of the top-1 score, and scattered
    less than minimising the error itself.

    Args:
        logits: [N, K], of images that were not trained on.
        labels: int64 [N].
    """
    logits = logits.double()
    golden = (math.sqrt(5) - 1) / 2

    @cache
    def loss(log_temperature: float) -> float:
        return float(cross_entropy(logits / math.exp(log_temperature), labels))

    # The loss is convex in 1 / temperature, so it has one minimum, which golden-section search finds.
    low, high = (math.log(limit) for limit in TEMPERATURE_RANGE)
    inner_low, inner_high = high - golden * (high - low), low + golden * (high - low)
    while high - low > 1e-4:
        if loss(inner_low) < loss(inner_high):
            high, inner_high = inner_high, inner_low
            inner_low = high - golden * (high - low)
        else:
            low, inner_low = inner_low, inner_high
            inner_high = low + golden * (high - low)
    return math.exp((low + high) / 2)


@dataclass(frozen=True)
class ConfidenceBin:
    """The images whose top-1 score lies in an interval of 0...1; all intervals are equally wide.

    Attributes:
        count: images.
        confidence: their mean top-1 score; 0 where there are none.
        accuracy: share of them whose answer was right; 0 where there are none.
    """

    count: int
    confidence: float
    accuracy: float


def confidence_bins(
    confidence: NDArray[np.float32], correct: NDArray[np.bool_], *, bins: int = BINS
) -> tuple[ConfidenceBin, ...]:
    """Return the bins of a reliability diagram.

    Args:
        confidence: [N], the top-1 score of each image, 0...1.
        correct: [N], whether that answer was right.
        bins: number of bins, of equal width: (lower, upper] as in the paper's definition.
    """
    bin_of = np.clip(np.ceil(confidence.astype(np.float64) * bins).astype(np.int64) - 1, 0, bins - 1)
    counts = np.bincount(bin_of, minlength=bins)
    means = np.bincount(bin_of, weights=confidence, minlength=bins) / counts.clip(1)
    shares = np.bincount(bin_of, weights=correct, minlength=bins) / counts.clip(1)
    return tuple(
        ConfidenceBin(int(count), float(mean), float(share))
        for count, mean, share in zip(counts, means, shares, strict=True)
    )


def expected_calibration_error(bins: Sequence[ConfidenceBin]) -> float:
    """Return the mean gap between confidence and accuracy over the bins, weighted by their images; 0 is perfect."""
    total = sum(group.count for group in bins)
    return sum(group.count * abs(group.accuracy - group.confidence) for group in bins) / total


@dataclass(frozen=True)
class MeasuredSets:
    """Sets of labels, measured on labelled pictures that they were not calibrated on.

    Attributes:
        covered: share of the pictures whose right label is in the set.
        labels: mean number of labels in a set, the empty ones included.
        abstained: share of the pictures whose set is empty.
    """

    covered: float
    labels: float
    abstained: float

    @classmethod
    def of(cls, members: NDArray[np.bool_], truth: NDArray[np.int64]) -> MeasuredSets:
        """Return the measures of sets, bool [N, K], of pictures of these classes, [N]."""
        sizes = members.sum(axis=1)
        covered = members[np.arange(len(truth)), truth]
        return cls(float(covered.mean()), float(sizes.mean()), float((sizes == 0).mean()))


def require_pictures(count: int, coverage: float, data: str) -> None:
    """Raise `DatasetError` unless so many pictures are enough for a coverage."""
    needed = pictures_needed(coverage)
    if count < needed:
        possible = f", and these for {math.floor(100 * (count - 1) / (count + 1)) / 100:g}" if count > 2 else ""
        raise DatasetError(
            f"{data}: {count} pictures are too few for a coverage of {coverage:g}: {needed} are enough{possible} "
            "(--coverage)"
        )


def calibrate(
    logits: NDArray[np.float32],
    truth: NDArray[np.int64],
    temperature: float,
    data: str,
    coverage: float,
    *,
    coverages: Sequence[float] = (),
    seed: int = 0,
) -> tuple[Calibration, int, dict[float, MeasuredSets]]:
    """Return a calibration, how many pictures its temperature was fitted to, and how sets of these coverages do.

    The temperature is fitted to a random fifth, if there are enough pictures and errors among them, and the sets are
    made by the other pictures, so that these are to the fitted scores as all pictures to come. How sets do is the mean
    over random halvings of those: one half calibrates, the other is measured.

    Args:
        logits: [N, K], of pictures that were not trained on.
        truth: [N], their classes.
        temperature: of the checkpoint, which stays where too few pictures are there to fit another.
        data: what the pictures are called.
        coverage: that must be possible.
        coverages: to measure; one that half of the pictures are too few for is left out.

    Raises:
        DatasetError: the pictures are too few.
    """
    require_pictures(len(truth), coverage, data)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(truth))
    fitted, rest = np.split(order, [len(order) // 5])
    is_enough = len(fitted) >= MIN_CALIBRATION_IMAGES and len(rest) >= pictures_needed(coverage)
    if not is_enough or bool((logits[fitted].argmax(axis=1) == truth[fitted]).all()):
        fitted, rest = order[:0], order
    else:
        temperature = fit_temperature(torch.from_numpy(logits[fitted]), torch.from_numpy(truth[fitted]))
    scores, energies = scores_and_energies(logits[rest], temperature)
    truth = truth[rest]
    right = scores[np.arange(len(rest)), truth]
    half = len(rest) // 2
    measured: dict[float, list[MeasuredSets]] = {each: [] for each in coverages if pictures_needed(each) <= half}
    for _ in range(_HALVINGS if measured else 0):
        some, others = np.split(generator.permutation(len(rest)), [half])
        known = np.sort(right[some]).tolist(), np.sort(energies[some]).tolist()
        for each, runs in measured.items():
            members = LabelSets.of(temperature, *known, each).members(scores[others], energies[others])
            runs.append(MeasuredSets.of(members, truth[others]))
    means = {
        each: MeasuredSets(*np.mean([astuple(run) for run in runs], axis=0).tolist()) for each, runs in measured.items()
    }
    calibration = calibration_of(logits[rest], truth, temperature, data, len(order))
    return calibration, len(fitted), means


def calibration_of(
    logits: NDArray[np.float32], truth: NDArray[np.int64], temperature: float, data: str, pictures: int | None = None
) -> Calibration:
    """Return what sets of labels are made by: scores and energies of at most `MAX_PICTURES` pictures.

    Args:
        logits: [N, K], of pictures that were not trained on.
        truth: [N], their classes.
        data: what the pictures are called.
        pictures: all of them, with those that only the temperature was fitted to; by default N.
    """
    scores, energies = scores_and_energies(logits[:MAX_PICTURES], temperature)
    right = scores[np.arange(len(scores)), truth[: len(scores)]]
    return Calibration.of(data, pictures or len(logits), temperature, right, energies)
