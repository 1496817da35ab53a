"""A linear probe: its fit, and the choice of its penalty."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from model.extensions.taught.linear_probe import (
    FOLDS,
    PENALTIES,
    Axes,
    Choice,
    choose_penalty,
    draw_folds,
    fit_head,
    interval,
)
from model.extensions.taught.score_fit import fit_scores


def noise(count: int, width: int = 12) -> NDArray[np.float64]:
    """Return features of any mean and scale."""
    return 40 + 7 * np.random.default_rng(count).normal(size=(count, width))


def choice_of(
    features: NDArray[np.float64], truth: NDArray[np.int64], folds: NDArray[np.int64]
) -> Choice:
    return choose_penalty(Axes.of(features), truth, folds, int(truth.max()) + 1)


def test_an_interval_is_of_shares() -> None:
    assert [interval(0, count)[0] for count in range(1, 200)] == [0.0] * 199
    assert [interval(count, count)[1] for count in range(1, 200)] == [1.0] * 199
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize("width", [12, 80], ids=["more pictures than features", "fewer"])
def test_each_head_minimises_its_loss(width: int) -> None:
    features = noise(60, width)
    truth = np.arange(60) % 3
    features[:, 0] += 5.0 * truth
    scaled = features - features.mean(axis=0)
    scale = np.sqrt(np.square(scaled).mean())
    norms: list[float] = []
    for penalty in PENALTIES:
        axes = Axes.of(features)
        found = axes.head(truth, 3, penalty)
        weight = torch.tensor(found[0] * scale, requires_grad=True)
        bias = torch.tensor(found[1] + found[0] @ features.mean(axis=0), requires_grad=True)
        loss = F.cross_entropy(
            torch.tensor(scaled / scale) @ weight.T + bias, torch.from_numpy(truth)
        )
        loss = loss + penalty / 2 * weight.square().sum()
        slopes = torch.autograd.grad(loss, (weight, bias))
        assert max(float(slope.abs().max()) for slope in slopes) < 2e-6
        norms.append(float(np.linalg.norm(found[0])))
    assert norms == sorted(norms)


def test_held_out_pictures_are_not_fitted_to() -> None:
    """Thirty features separate forty pictures of noise if the fit has seen them."""
    features = noise(40, 30)
    truth = np.arange(40) % 2
    folds = np.arange(40) // 2 % 5
    axes = Axes.of(features)
    weight, bias = axes.head(truth, 2, PENALTIES[-1])
    choice = choice_of(features, truth, folds)
    assert ((features @ weight.T + bias).argmax(axis=1) == truth).all()
    assert (choice.scores.argmax(axis=1) == truth[choice.rows]).mean() < 0.8
    assert sorted(choice.rows.tolist()) == list(range(40))
    assert choice.loss > 0.6
    some = choice_of(features, truth, np.where(folds == 0, 0, -1))
    assert some.rows.tolist() == np.flatnonzero(folds == 0).tolist()


@pytest.mark.parametrize("count", [40, 400])
def test_the_best_held_out_penalty_is_chosen(count: int) -> None:
    features = noise(count, 20)
    truth = np.arange(count) % 4
    features += 6 * np.eye(20)[truth]
    folds = np.arange(count) // 4 % 5
    axes = Axes.of(features)
    losses: list[float] = []
    for penalty in PENALTIES:
        logits = np.empty((count, 4))
        for number in range(5):
            seen = axes._replace(values=axes.values[folds != number])
            weight, bias = seen.head(truth[folds != number], 4, penalty)
            logits[folds == number] = features[folds == number] @ weight.T + bias
        temperature = fit_scores(logits, truth).temperature
        losses.append(
            float(F.cross_entropy(torch.from_numpy(logits / temperature), torch.from_numpy(truth)))
        )
    choice = choice_of(features, truth, folds)
    best = next(
        n for n, loss in enumerate(losses) if loss < min(losses[n + 1 : n + 3], default=np.inf)
    )
    assert PENALTIES.index(choice.penalty) == best
    assert choice.loss == pytest.approx(losses[best], abs=1e-3)
    assert choice.temperature != 1.0


def test_each_class_is_spread_over_all_folds() -> None:
    truth = np.repeat([0, 1, 2], [20, 11, 1])
    folds = draw_folds(truth, 3, seed=0)
    assert folds[-1] == -1, "the only one of its class is always fitted to"
    for number in range(2):
        counts = np.bincount(folds[truth == number], minlength=FOLDS)
        assert counts.max() - counts.min() <= 1


def test_equal_pictures_give_an_equal_head() -> None:
    features = noise(60)
    truth = np.arange(60) % 3
    features[:, 0] += 5.0 * truth
    (first, one), (second, two) = (
        fit_head(features.astype(np.float32), truth, "abc") for _ in range(2)
    )
    assert first.weight is not None
    assert second.weight is not None
    assert np.array_equal(first.weight, second.weight)
    assert np.array_equal(one.scores, two.scores)
    assert not np.array_equal(draw_folds(truth, 3, seed=0), draw_folds(truth, 3, seed=1))
