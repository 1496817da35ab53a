"""A linear probe: softmax regression on features, with a penalty on its squared weights; a function of arrays alone.

The penalty is chosen by cross-validation, and the head is then fitted to all features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from model.calibration import fit_scores
from model.runtime.torch_pass import one_thread

PENALTIES: Final = tuple(10 ** (0.5 - number / 2) for number in range(11))
"""What half the squared weights are multiplied by, for features of unit variance; the strongest first."""
_PATIENCE: Final = 2
"""Penalties that are tried after the best one."""
_GRADIENT: Final = 1e-6
"""Largest entry of the gradient where a fit ends."""
_FOLDS: Final = 5
_ENOUGH: Final = 10_000
"""Features that are held out, at most: of more than this a single fold is."""
_MANY: Final = 1_000_000
"""Logits of all features from which on several threads fit a head. In smaller fits they wait longer than they work."""


class Head(NamedTuple):
    """A linear head of K classes: weight [K, D] and bias [K], float64."""

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits, float64 [N, K], of features, float64 [N, D]."""
        return features @ self.weight.T + self.bias


class Choice(NamedTuple):
    """The result of a cross-validation.

    Attributes:
        penalty: the one with the lowest loss.
        temperature: of the held-out scores at this penalty; see `fit_scores`.
        loss: their mean negative log-likelihood at this temperature, in nats.
        rows: int64 [M], the features that were held out.
        logits: float64 [M, K], theirs at this penalty.
    """

    penalty: float
    temperature: float
    loss: float
    rows: Tensor
    logits: Tensor


def fit_head(
    features: Tensor, labels: Tensor, classes: int, folds: NDArray[np.int64] | None = None, *, seed: int = 0
) -> tuple[Head, Choice]:
    """Fit a head to features, with the penalty that gives held-out features the best scores.

    Args:
        features: float64 [N, D].
        labels: int64 [N]; of each class at least two.
        folds: int64 [N], the fold in which each is held out, -1 for none; by default five, drawn by `seed`.
    """
    choice = choose_penalty(features, labels, draw_folds(labels.numpy(), seed) if folds is None else folds, classes)
    path = head_path(features, labels, classes)
    return next(islice(path, PENALTIES.index(choice.penalty), None)), choice


def draw_folds(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return the fold in which each feature is held out, int64 [N]; each class is spread over all of them."""
    order = np.random.default_rng(seed).permutation(len(labels))
    folds = np.empty(len(labels), np.int64)
    folds[order[np.argsort(labels[order], kind="stable")]] = np.arange(len(labels)) % _FOLDS
    folds[folds >= math.ceil(_ENOUGH / len(labels))] = -1
    return folds


def choose_penalty(features: Tensor, labels: Tensor, folds: NDArray[np.int64], classes: int) -> Choice:
    """Return the penalty whose heads give held-out features the best scores.

    A strong penalty often gives the better answers, at scores that are too low. The temperature mends these, so the
    losses are compared with it. For the arguments see `fit_head`.
    """
    numbers = range(folds.max() + 1)
    held_out = [torch.from_numpy(np.flatnonzero(folds == number)) for number in numbers]
    rest = [torch.from_numpy(np.flatnonzero(folds != number)) for number in numbers]
    paths = [head_path(features[rows], labels[rows], classes) for rows in rest]
    rows = torch.cat(held_out)
    best: Choice | None = None
    for penalty, heads in zip(PENALTIES, zip(*paths, strict=True), strict=True):
        logits = torch.cat([head.logits(features[part]) for head, part in zip(heads, held_out, strict=True)])
        temperature = fit_scores(logits.numpy(), labels[rows].numpy()).temperature
        loss = float(F.cross_entropy(logits / temperature, labels[rows]))
        if best is None or loss < best.loss:
            best = Choice(penalty, temperature, loss, rows, logits)
        elif PENALTIES.index(penalty) - PENALTIES.index(best.penalty) == _PATIENCE:
            break
    assert best is not None
    return best


def head_path(features: Tensor, labels: Tensor, classes: int) -> Iterator[Head]:
    """Yield the head of each penalty, the strongest first, each found from the one before it.

    A head is the minimum of the mean negative log-likelihood plus the penalty times half the sum of squared weights,
    for features that are centred and divided by the root of their mean variance. The bias has no penalty.

    Args:
        features: float64 [N, D].
        labels: int64 [N].
    """
    mean = features.mean(dim=0)
    scale = (features - mean).square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (features - mean) / scale
    weight = torch.zeros(classes, features.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    for penalty in PENALTIES:
        optimiser = torch.optim.LBFGS(
            [weight, bias],
            max_iter=1000,
            tolerance_grad=_GRADIENT,
            tolerance_change=0,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def loss(optimiser: torch.optim.LBFGS = optimiser, penalty: float = penalty) -> Tensor:
            optimiser.zero_grad()
            value = F.cross_entropy(F.linear(scaled, weight, bias), labels) + penalty / 2 * weight.square().sum()
            value.backward()  # type: ignore[no-untyped-call]
            return value

        with one_thread(features.device) if len(features) * classes < _MANY else nullcontext():
            optimiser.step(loss)  # type: ignore[no-untyped-call]
        unscaled = weight.detach() / scale
        yield Head(unscaled, bias.detach() - unscaled @ mean)
