"""A linear probe: softmax regression on features, with a penalty on its squared weights.

Cross-validation chooses the penalty, and the head is then fitted to all features. The minimum is
searched along the features' principal axes, each scaled by the curvature of the loss. L-BFGS
(Nocedal & Wright 2006, algorithm 7.4) then takes few steps; see
docs/decisions/linear-probe.md. Only arrays are needed, no torch.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from model.calibration import scores_and_energies
from model.extensions.taught.score_fit import fit_scores, losses
from model.heads import Head

Floats = NDArray[np.floating]

# Factors of half the squared weights, for features of unit variance; the strongest first.
PENALTIES: Final = tuple(10 ** (0.5 - number / 2) for number in range(11))
FOLDS: Final = 5
# Number of penalties that are tried after the best one.
_PATIENCE: Final = 2
# Norms of the scaled gradient at which a fit ends. Half the square of the norm is about the
# distance of the loss from its minimum.
_EXACT: Final = 1e-6
_NEAR: Final = 1e-3
# Most steps of L-BFGS, and the number of steps that it remembers.
_STEPS: Final = 1000
_MEMORY: Final = 10
# Shortest step that is tried: the precision of the dtype ends there.
_SHORTEST: Final = 1e-3
# Share of the expected decrease that a step must reach (Armijo's rule).
_SUFFICIENT: Final = 1e-4
# Number of logits from which on only one fold is held out.
_MANY: Final = 20_000_000


class Choice(NamedTuple):
    """The result of a cross-validation.

    Attributes:
        penalty: the penalty with the lowest loss.
        temperature: temperature of the held-out scores at this penalty; see `fit_scores`.
        loss: mean negative log-likelihood of held-out pictures at this temperature, in nats.
        rows: int64 [M], indices of the held-out features, ascending.
        logits: float32 [M, C], logits of the held-out features at this penalty.
        scores: float64 [M, C], scores of these logits at this temperature.
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
        truth: int64 [N], the class of each feature.
        labels: labels of the C classes.
        folds: int64 [N], the fold in which each feature is held out, -1 for none; None draws them.
        seed: seed of the folds, see `draw_folds`.
    """
    axes = Axes.of(features)
    if folds is None:
        folds = draw_folds(truth, len(labels), seed)
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


class Axes(NamedTuple):
    """Features along their principal axes, centred and divided by the root of their mean variance.

    Attributes:
        mean: float64 [D].
        scale: root of the mean variance.
        basis: float64 [D, A], unit vectors; axes without variance are left out.
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
        deviation = float(np.sqrt(np.square(exact - mean).mean()))
        scale = max(deviation, float(np.finfo(np.float32).tiny))
        scaled = (exact - mean) / scale
        # The smaller of the two products has everything that is needed.
        has_few_rows = scaled.shape[0] < scaled.shape[1]
        product = scaled @ scaled.T if has_few_rows else scaled.T @ scaled
        squares, vectors = np.linalg.eigh(product)
        is_kept = squares > 1e-10 * max(float(squares[-1]), 1.0)
        squares = squares[is_kept]
        basis = vectors[:, is_kept]
        if has_few_rows:
            basis = scaled.T @ basis / np.sqrt(squares)
        return cls(mean, scale, basis, squares / len(exact), scaled @ basis)

    def head(
        self, truth: NDArray[np.int64], classes: int, penalty: float
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the weight [C, D] and bias [C] for the original features."""
        widths = self.widths(classes, penalty)
        strength = penalty * np.square(widths) * self.penalised
        start = np.zeros((classes, len(widths)))
        unscaled = minimise(self.scaled(widths), truth, strength, start, _EXACT) * widths
        weight = unscaled[:, :-1] @ self.basis.T / self.scale
        return weight, unscaled[:, -1] - weight @ self.mean

    @property
    def penalised(self) -> NDArray[np.float64]:
        """Return 1 for each axis and 0 for the bias, which is not penalised."""
        return np.append(np.ones(len(self.variances)), 0.0)

    def widths(self, classes: int, penalty: float) -> NDArray[np.float64]:
        """Return the divisors of the parameters, [A + 1], the bias last.

        They make the curvature along each axis about 1.
        """
        curvature = max((1 - 1 / classes) / classes, 1e-3)
        curvatures = np.append(curvature * self.variances + penalty, curvature)
        widths: NDArray[np.float64] = 1 / np.sqrt(curvatures)
        return widths

    def scaled(self, widths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return features, and a column for the bias, multiplied by widths: [N, A + 1]."""
        return np.column_stack([self.values, np.ones(len(self.values))]) * widths


def choose_penalty(
    axes: Axes, truth: NDArray[np.int64], folds: NDArray[np.int64], classes: int
) -> Choice:
    """Return the penalty whose heads give held-out features the best scores.

    A strong penalty often gives the better answers with scores that are too low. A temperature
    corrects the scores, so losses are compared after it is fitted. For the arguments see
    `fit_head`.
    """
    numbers = range(folds.max() + 1)
    held_out = [np.flatnonzero(folds == number) for number in numbers]
    rest = [np.flatnonzero(folds != number) for number in numbers]
    rows = np.flatnonzero(folds >= 0)
    logits = np.empty((len(truth), classes), np.float32)
    # Each fit starts from the fit of the penalty before, divided by the new widths.
    fits: list[Floats] = [np.zeros((classes, axes.values.shape[1] + 1), np.float32)] * len(numbers)
    previous_widths = np.ones(1)
    best: Choice | None = None
    for number, penalty in enumerate(PENALTIES):
        widths = axes.widths(classes, penalty)
        scaled = axes.scaled(widths).astype(np.float32)
        strength = (penalty * np.square(widths) * axes.penalised).astype(np.float32)
        for fold in numbers:
            start = (fits[fold] * (previous_widths / widths)).astype(np.float32)
            others = rest[fold]
            fits[fold] = minimise(scaled[others], truth[others], strength, start, _NEAR)
            logits[held_out[fold]] = scaled[held_out[fold]] @ fits[fold].T
        previous_widths = widths
        fit = fit_scores(logits[rows], truth[rows])
        loss = float(losses(logits[rows], truth[rows], fit).mean())
        if best is None or loss < best.loss:
            scores, _ = scores_and_energies(logits[rows], *fit)
            best = Choice(penalty, fit.temperature, loss, rows, logits[rows], scores)
        elif number - PENALTIES.index(best.penalty) == _PATIENCE:
            break
    assert best is not None
    return best


class _Step(NamedTuple):
    """A step of L-BFGS: how parameters and gradient changed, and the product of both changes."""

    parameters: Floats
    gradient: Floats
    product: float


def minimise(
    values: Floats, truth: NDArray[np.int64], strength: Floats, start: Floats, tolerance: float
) -> Floats:
    """Return the parameters [C, A] with the lowest loss, in the dtype of the values.

    Args:
        values: [N, A]; logits are their products with parameters.
        truth: int64 [N].
        strength: [A], factors of half the squared parameters.
        start: [C, A].
        tolerance: norm of the gradient at which the search ends.
    """
    parameters = start
    loss, gradient = _loss(values, truth, strength, parameters)
    steps: list[_Step] = []
    for _ in range(_STEPS):
        if np.linalg.norm(gradient) <= tolerance:
            break
        direction = _direction(steps, gradient)
        decrease = float(np.vdot(direction, gradient))
        length = 1.0
        while True:
            change = -length * direction
            next_loss, next_gradient = _loss(values, truth, strength, parameters + change)
            if next_loss <= loss - _SUFFICIENT * length * decrease:
                break
            length /= 2
            if length < _SHORTEST:
                return parameters
        gradient_change = next_gradient - gradient
        parameters = parameters + change
        loss = next_loss
        gradient = next_gradient
        product = float(np.vdot(change, gradient_change))
        if product > 0:
            steps = [*steps[1 - _MEMORY :], _Step(change, gradient_change, product)]
    return parameters


def _loss(
    values: Floats, truth: NDArray[np.int64], strength: Floats, parameters: Floats
) -> tuple[float, Floats]:
    """Return the mean negative log-likelihood plus the penalty, and its gradient [C, A]."""
    rows = np.arange(len(truth))
    logits = values @ parameters.T
    logits -= logits.max(axis=1, keepdims=True)
    right = logits[rows, truth]
    shares = np.exp(logits, out=logits)
    total = shares.sum(axis=1)
    penalty = strength * parameters
    loss = (np.log(total) - right).mean(dtype=np.float64) + np.vdot(penalty, parameters) / 2
    shares /= total[:, np.newaxis]
    shares[rows, truth] -= 1
    return float(loss), shares.T @ values / len(truth) + penalty


def _direction(steps: Sequence[_Step], gradient: Floats) -> Floats:
    """Return the gradient, corrected by the curvature of the last steps: the ascent of L-BFGS."""
    direction = gradient
    factors: list[np.floating] = []
    for step in reversed(steps):
        factor = np.vdot(step.parameters, direction) / step.product
        factors.append(factor)
        direction = direction - factor * step.gradient
    if steps:
        last = steps[-1]
        direction = direction * (last.product / np.vdot(last.gradient, last.gradient))
    for step, factor in zip(steps, reversed(factors), strict=True):
        correction = factor - np.vdot(step.gradient, direction) / step.product
        direction = direction + step.parameters * correction
    return direction
