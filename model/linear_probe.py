"""A linear probe: softmax regression on features, with a penalty on its squared weights; of arrays
alone, no torch.

The penalty is chosen by cross-validation, and the head is then fitted to all features. For its
minimum, features are turned to their principal axes, and each axis is scaled by the curvature of
the loss there: L-BFGS (Nocedal & Wright 2006, algorithm 7.4) then takes some ten steps.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from model.calibration import fit_scores, losses, scores_and_energies
from model.heads import Head

Floats = NDArray[np.floating]

# What half the squared weights are multiplied by, for features of unit variance; the strongest
# first.
PENALTIES: Final = tuple(10 ** (0.5 - number / 2) for number in range(11))
# Penalties that are tried after the best one.
FOLDS: Final = 5
_PATIENCE: Final = 2
# Norms of the scaled gradient where a fit ends: half its square is about what the loss lies above
# its minimum.
_EXACT: Final = 1e-6
_NEAR: Final = 1e-3
# Steps that L-BFGS remembers.
_STEPS: Final = 1000
_MEMORY: Final = 10
# Logits of all features from which on a single fold is held out.
_MANY: Final = 20_000_000


class Choice(NamedTuple):
    """The result of a cross-validation.

    Attributes:
        penalty: the one with the lowest loss.
        temperature: of the held-out scores at this penalty; see `fit_scores`.
        loss: their mean negative log-likelihood at this temperature, in nats.
        rows: int64 [M], the features that were held out, ascending.
        logits: float32 [M, C], theirs at this penalty.
        scores: float64 [M, C], of these at this temperature.
    """

    penalty: float
    temperature: float
    loss: float
    rows: NDArray[np.int64]
    logits: NDArray[np.float32]
    scores: NDArray[np.float64]


def fit_head(
    features: Floats,
    truth: NDArray[np.int64],
    labels: Sequence[str],
    folds: NDArray[np.int64] | None = None,
    *,
    seed: int = 0,
) -> tuple[Head, Choice]:
    """Fit a head to features, with the penalty that gives held-out features the best scores.

    Args:
        features: [N, D].
        truth: int64 [N], the class of each.
        labels: of the C classes.
        folds: int64 [N], the fold in which each is held out, -1 for none; by default those that
        `seed` draws.
    """
    axes = Axes.of(features)
    folds = draw_folds(truth, len(labels), seed) if folds is None else folds
    choice = choose_penalty(axes, truth, folds, len(labels))
    weight, bias = axes.head(truth, len(labels), choice.penalty)
    head = Head(
        tuple(labels),
        False,
        choice.temperature,
        weight=weight.astype(np.float32),
        bias=bias.astype(np.float32),
    )
    return head, choice


def draw_folds(truth: NDArray[np.int64], classes: int, seed: int) -> NDArray[np.int64]:
    """Return the fold in which each feature is held out, int64 [N]; each class is spread over all
    of them.

    What is the only one of its class is never held out, and of very many features a single fold is.
    """
    order = np.random.default_rng(seed).permutation(len(truth))
    folds = np.empty(len(truth), np.int64)
    folds[order[np.argsort(truth[order], kind="stable")]] = np.arange(len(truth)) % FOLDS
    folds[np.bincount(truth, minlength=classes)[truth] < 2] = -1
    if len(truth) * classes > _MANY:
        folds[folds > 0] = -1
    return folds


def interval(right: float, count: float) -> tuple[float, float]:
    """Return the interval of a share, right of count, that holds the true one with 95% confidence
    (Wilson 1927).
    """
    share, z = right / count, 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return max(0.0, round(middle - half, 9)), min(1.0, round(middle + half, 9))


class Axes(NamedTuple):
    """Features that are centred, divided by the root of their mean variance, and turned to their
    principal axes.

    Attributes:
        mean: float64 [D].
        scale: the root of the mean variance.
        basis: float64 [D, A], unit vectors; axes on which nothing varies are left out.
        variances: float64 [A].
        values: float64 [N, A].
    """

    mean: NDArray[np.float64]
    scale: float
    basis: NDArray[np.float64]
    variances: NDArray[np.float64]
    values: NDArray[np.float64]

    @classmethod
    def of(cls, features: Floats) -> Self:
        """Return the axes of features [N, D]."""
        exact = features.astype(np.float64)
        mean = exact.mean(axis=0)
        scale = max(
            float(np.sqrt(np.square(exact - mean).mean())), float(np.finfo(np.float32).tiny)
        )
        scaled = (exact - mean) / scale
        few = (
            scaled.shape[0] < scaled.shape[1]
        )  # the smaller of the two products has all that is needed
        squares, vectors = np.linalg.eigh(scaled @ scaled.T if few else scaled.T @ scaled)
        kept = squares > 1e-10 * max(float(squares[-1]), 1.0)
        squares, vectors = squares[kept], vectors[:, kept]
        basis = scaled.T @ vectors / np.sqrt(squares) if few else vectors
        return cls(mean, scale, basis, squares / len(exact), scaled @ basis)

    def head(
        self, truth: NDArray[np.int64], classes: int, penalty: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weight [C, D] and the bias [C] of a penalty, fitted to all features, for
        features as they came.
        """
        widths = self.widths(classes, penalty)
        strength, start = (
            penalty * np.square(widths) * self.penalised,
            np.zeros((classes, len(widths))),
        )
        unscaled = minimise(self.scaled(widths), truth, strength, start, _EXACT) * widths
        weight = unscaled[:, :-1] @ self.basis.T / self.scale
        return weight, unscaled[:, -1] - weight @ self.mean

    @property
    def penalised(self) -> NDArray[np.float64]:
        """Return 1 for each axis and 0 for the bias, which has no penalty."""
        return np.append(np.ones(len(self.variances)), 0.0)

    def widths(self, classes: int, penalty: float) -> NDArray[np.float64]:
        """Return what parameters are divided by, [A + 1]: the curvature is then about 1 along each,
        the bias last.
        """
        curvature = max((1 - 1 / classes) / classes, 1e-3)
        widths: NDArray[np.float64] = 1 / np.sqrt(
            np.append(curvature * self.variances + penalty, curvature)
        )
        return widths

    def scaled(self, widths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return features, and a column for the bias, multiplied by widths: [N, A + 1]."""
        return np.column_stack([self.values, np.ones(len(self.values))]) * widths


def choose_penalty(
    axes: Axes, truth: NDArray[np.int64], folds: NDArray[np.int64], classes: int
) -> Choice:
    """Return the penalty whose heads give held-out features the best scores.

    A strong penalty often gives the better answers, at scores that are too low. The temperature
    mends these, so the losses are compared with it. For the arguments see `fit_head`.
    """
    numbers = range(folds.max() + 1)
    held_out, rest = (
        [np.flatnonzero((folds == n) == out) for n in numbers] for out in (True, False)
    )
    rows, logits = np.flatnonzero(folds >= 0), np.empty((len(truth), classes), np.float32)
    parameters = [np.zeros((classes, axes.values.shape[1] + 1), np.float32) for _ in numbers]
    before = np.ones(1)
    best: Choice | None = None
    for number, penalty in enumerate(PENALTIES):
        widths = axes.widths(classes, penalty)
        scaled = axes.scaled(widths).astype(np.float32)
        strength = (penalty * np.square(widths) * axes.penalised).astype(np.float32)
        begun = [(found * (before / widths)).astype(np.float32) for found in parameters]
        pairs = zip(rest, begun, strict=True)
        parameters = [
            minimise(scaled[part], truth[part], strength, start, _NEAR) for part, start in pairs
        ]
        before = widths
        for part, found in zip(held_out, parameters, strict=True):
            logits[part] = scaled[part] @ found.T
        fit = fit_scores(logits[rows], truth[rows])
        loss = float(losses(logits[rows], truth[rows], fit).mean())
        if best is None or loss < best.loss:
            scores, _ = scores_and_energies(logits[rows], *fit)
            best = Choice(penalty, fit.temperature, loss, rows, logits[rows], scores)
        elif number - PENALTIES.index(best.penalty) == _PATIENCE:
            break
    assert best is not None
    return best


def minimise(
    values: Floats, truth: NDArray[np.int64], strength: Floats, start: Floats, tolerance: float
) -> Floats:
    """Return the parameters [C, A] of the least mean negative log-likelihood plus penalty, in the
    dtype of the values.

    Args:
        values: [N, A]; logits are their products with parameters.
        truth: int64 [N].
        strength: [A], what half of the squared parameters are multiplied by.
        start: [C, A].
        tolerance: the norm of the gradient that is small enough.
    """
    found, (loss, slope) = start, _loss(values, truth, strength, start)
    steps: list[tuple[Floats, Floats, float]] = []
    for _ in range(_STEPS):
        if np.linalg.norm(slope) <= tolerance:
            break
        direction, length = _direction(steps, slope), 1.0
        fall = float(np.vdot(direction, slope))
        while (tried := _loss(values, truth, strength, found - length * direction))[
            0
        ] > loss - 1e-4 * length * fall:
            length /= 2
            if length < 1e-3:  # the digits of the dtype end here
                return found
        change, bend = -length * direction, tried[1] - slope
        found, (loss, slope) = found + change, tried
        if (along := float(np.vdot(change, bend))) > 0:
            steps = [*steps[1 - _MEMORY :], (change, bend, along)]
    return found


def _loss(
    values: Floats, truth: NDArray[np.int64], strength: Floats, parameters: Floats
) -> tuple[float, Floats]:
    """Return the mean negative log-likelihood plus the penalty, and its gradient [C, A]."""
    logits, each = values @ parameters.T, np.arange(len(truth))
    logits -= logits.max(axis=1, keepdims=True)
    right = logits[each, truth]
    shares = np.exp(logits, out=logits)
    total = shares.sum(axis=1)
    pulled = strength * parameters
    loss = (np.log(total) - right).mean(dtype=np.float64) + np.vdot(pulled, parameters) / 2
    shares /= total[:, np.newaxis]
    shares[each, truth] -= 1
    return float(loss), shares.T @ values / len(truth) + pulled


def _direction(steps: Sequence[tuple[Floats, Floats, float]], slope: Floats) -> Floats:
    """Return the slope, changed by the curvature that the last steps saw: the way of L-BFGS,
    uphill.
    """
    direction, factors = slope, []
    for change, bend, along in reversed(steps):
        factors.append(np.vdot(change, direction) / along)
        direction = direction - factors[-1] * bend
    if steps:
        direction = direction * (steps[-1][2] / np.vdot(steps[-1][1], steps[-1][1]))
    for (change, bend, along), factor in zip(steps, reversed(factors), strict=True):
        direction = direction + change * (factor - np.vdot(bend, direction) / along)
    return direction
