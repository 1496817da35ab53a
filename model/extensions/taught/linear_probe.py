"""A linear probe: linear discriminant analysis of features, with a shrunk covariance.

Classes are Gaussian, equally probable, and share one covariance (Hastie, Tibshirani & Friedman
2009, section 4.3). The covariance of the pictures is mixed with a multiple of the identity
(Friedman 1989), because there are often fewer pictures than features. Cross-validation chooses the
share; see docs/decisions/linear-probe.md. Only arrays are needed, no torch.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.calibration import scores_and_energies
from model.extensions.taught.score_fit import fit_scores, losses
from model.heads import Head

Floats = NDArray[np.float32]
Classes = NDArray[np.int64]

# Shares of the identity in the covariance; with more pictures, a smaller share is better.
SHRINKAGES: Final = (0.8, 0.5, 0.25, 0.1, 0.03, 0.01)
FOLDS: Final = 5
# Mean difference between the logits of a class at its own mean, and at the means of the others.
# With it, scores of 3 to 10 pictures per class had the lowest loss on other pictures.
_MEAN_MARGIN: Final = 8.0
# Smallest mean variance within classes, relative to the variance of all features, and absolute: it
# is the rounding of features of about 1.
_LEAST_VARIANCE: Final = 1e-6
_ROUNDING: Final = 1e-12
# Smallest margin that is scaled: with equal pictures in all classes it is 0.
_LEAST_MARGIN: Final = 1e-6
# Number of logits from which on only one fold is held out.
_MANY: Final = 5_000_000


class Choice(NamedTuple):
    """The result of a cross-validation.

    Attributes:
        shrinkage: the shrinkage with the lowest loss.
        temperature: temperature of the held-out scores at this shrinkage; see `fit_scores`.
        rows: int64 [M], indices of the held-out features, ascending.
        logits: float32 [M, C], logits of the held-out features at this shrinkage.
        scores: float64 [M, C], scores of these logits at this temperature.
    """

    shrinkage: float
    temperature: float
    rows: NDArray[np.int64]
    logits: Floats
    scores: NDArray[np.float64]


class Discriminant(NamedTuple):
    """Weight [C, D] and bias [C] of logits, float64."""

    weight: NDArray[np.float64]
    bias: NDArray[np.float64]


def fit_head(
    features: Floats,
    truth: Classes,
    labels: Sequence[str],
    folds: NDArray[np.int64] | None = None,
    *,
    scales: Floats | float = 1.0,
    seed: int = 0,
) -> tuple[Head, Choice]:
    """Fit a head to features, with the shrinkage that gives held-out features the best scores.

    Args:
        features: [N, D].
        truth: int64 [N], the class of each feature; every class has one.
        labels: labels of the C classes.
        folds: int64 [N], the fold in which each feature is held out, -1 for none; None draws them.
        scales: divisors of the features for the fit; the head reads undivided features.
        seed: seed of the folds, see `draw_folds`.
    """
    mean = features.mean(axis=0)
    centred = (features - mean) / scales
    basis: Floats | None = None
    if len(features) < features.shape[1]:
        # The features lie in a space of fewer dimensions than they have values.
        basis = np.linalg.qr(centred.T)[0]
        centred = centred @ basis
    if folds is None:
        folds = draw_folds(truth, len(labels), seed)
    choice = choose_shrinkage(centred, truth, folds, len(labels))
    [(weight, bias)] = discriminants(centred, truth, len(labels), [choice.shrinkage])
    if basis is not None:
        weight = weight @ basis.T
    weight = weight / scales
    head = Head(
        tuple(labels),
        False,
        choice.temperature,
        weight=weight.astype(np.float32),
        bias=(bias - weight @ mean).astype(np.float32),
    )
    return head, choice


def draw_folds(truth: Classes, classes: int, seed: int) -> NDArray[np.int64]:
    """Return the fold in which each feature is held out, int64 [N]; each class is in all folds.

    The only feature of a class is never held out. With very many features, only one fold is.
    """
    order = np.random.default_rng(seed).permutation(len(truth))
    folds = np.empty(len(truth), np.int64)
    folds[order[np.argsort(truth[order], kind="stable")]] = np.arange(len(truth)) % FOLDS
    folds[np.bincount(truth, minlength=classes)[truth] < 2] = -1
    if len(truth) * classes > _MANY:
        folds[folds > 0] = -1
    return folds


def interval(right: float, count: float) -> tuple[float, float]:
    """Return the 95 % confidence interval of a share, right of count (Wilson 1927)."""
    share = right / count
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, round(middle - half, 9)), min(1.0, round(middle + half, 9))


def choose_shrinkage(
    features: Floats, truth: Classes, folds: NDArray[np.int64], classes: int
) -> Choice:
    """Return the shrinkage whose heads give held-out features the best scores.

    A smaller shrinkage must lower the mean loss by more than its standard error, because a few
    pictures favour one by chance. Losses are compared after a temperature is fitted. For the
    arguments see `fit_head`.
    """
    rows = np.flatnonzero(folds >= 0)
    logits = np.empty((len(SHRINKAGES), len(rows), classes), np.float32)
    for fold in range(folds.max() + 1):
        is_held = folds == fold
        others = discriminants(features[~is_held], truth[~is_held], classes, SHRINKAGES)
        for number, (weight, bias) in enumerate(others):
            logits[number, is_held[rows]] = features[is_held] @ weight.T + bias
    best = 0
    fits = [fit_scores(held_out, truth[rows]) for held_out in logits]
    held_out_losses = [
        losses(held_out, truth[rows], fit) for held_out, fit in zip(logits, fits, strict=True)
    ]
    for number, loss in enumerate(held_out_losses):
        gain = held_out_losses[best] - loss
        if gain.mean() > gain.std() / math.sqrt(len(gain)):
            best = number
    scores, _ = scores_and_energies(logits[best], *fits[best])
    return Choice(
        SHRINKAGES[best],
        fits[best].temperature,
        rows,
        logits[best],
        scores,
    )


def discriminants(
    features: Floats, truth: Classes, classes: int, shrinkages: Sequence[float]
) -> Iterator[Discriminant]:
    """Yield the discriminant of centred features [N, D] for each shrinkage.

    The logit of a class is minus half the squared Mahalanobis distance to its mean. The mean of few
    features is off by their variance, which makes distances to it too long. The bias corrects that.
    """
    means = np.stack([features[truth == label].mean(axis=0) for label in range(classes)])
    deviations = features - means[truth]
    covariance = (deviations.T @ deviations).astype(np.float64) / max(1, len(truth) - classes)
    # All shrunk covariances have the same axes, so one decomposition replaces an inverse for each.
    variances, axes = np.linalg.eigh(covariance)
    variances = variances.clip(min=0)
    projected = means @ axes
    counts = np.bincount(truth, minlength=classes)
    least = _LEAST_VARIANCE * float(features.var()) + _ROUNDING
    mean_variance = max(variances.mean(), least)
    for shrinkage in shrinkages:
        shrunk = (1 - shrinkage) * variances + shrinkage * mean_variance
        weight = projected / shrunk @ axes.T
        excess = (variances / shrunk).sum() / counts
        bias = (excess - (weight * means).sum(axis=1)) / 2
        at_means = means @ weight.T + bias
        margin = (at_means.diagonal() - at_means.mean(axis=1)).mean() * classes / (classes - 1)
        scale = _MEAN_MARGIN / max(margin, _LEAST_MARGIN)
        yield Discriminant(weight * scale, bias * scale)
