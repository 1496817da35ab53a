"""A linear probe: its fit, and the choice of its shrinkage."""

import numpy as np
import pytest
from numpy.typing import NDArray

from model.extensions.taught.linear_probe import (
    FOLDS,
    SHRINKAGES,
    choose_shrinkage,
    discriminants,
    draw_folds,
    fit_head,
    interval,
)

Floats = NDArray[np.float32]


def clusters(count: int, width: int = 12, classes: int = 3, distance: float = 5.0) -> Floats:
    """Return features of any mean, of classes in turn, whose means are apart."""
    features = 40 + np.random.default_rng(count).normal(size=(count, width))
    features[np.arange(count), np.arange(count) % classes] += distance
    return features.astype(np.float32)


def test_an_interval_is_of_shares() -> None:
    assert [interval(0, count)[0] for count in range(1, 200)] == [0.0] * 199
    assert [interval(count, count)[1] for count in range(1, 200)] == [1.0] * 199
    assert interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)


@pytest.mark.parametrize("shrinkage", [0.1, 0.8])
def test_logits_are_mahalanobis_distances(shrinkage: float) -> None:
    truth = np.array([0] * 30 + [1] * 20 + [2] * 10)
    features = np.random.default_rng(0).normal(size=(60, 5)) + 2 * np.eye(5)[truth]
    means = [features[truth == label].mean(axis=0) for label in range(3)]
    covariance = sum(
        np.cov(features[truth == label].T, bias=True) * count
        for label, count in enumerate((30, 20, 10))
    ) / (60 - 3)
    shrunk = (1 - shrinkage) * covariance + shrinkage * np.trace(covariance) / 5 * np.eye(5)
    inverse = np.linalg.inv(shrunk)
    excess = np.trace(inverse @ covariance)
    distances = np.stack(
        [
            np.einsum("nd,de,ne->n", features - mean, inverse, features - mean) - excess / count
            for mean, count in zip(means, (30, 20, 10), strict=True)
        ],
        axis=1,
    )
    [(weight, bias)] = discriminants(features.astype(np.float32), truth, 3, [shrinkage])
    logits = features @ weight.T + bias
    differences = logits - logits[:, :1]
    expected = (distances[:, :1] - distances) / 2
    scale = np.linalg.norm(differences) / np.linalg.norm(expected)
    np.testing.assert_allclose(differences, scale * expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scales", [1.0, np.array([1.0] * 40 + [9.0] * 40, np.float32)])
def test_few_pictures_span_their_own_space(scales: float | Floats) -> None:
    """The fit in the space of 30 pictures equals the fit in all 80 dimensions."""
    features = clusters(30, 80) * scales
    truth = np.arange(30) % 3
    head, choice = fit_head(features, truth, "abc", scales=scales)
    centred = (features - features.mean(axis=0)) / scales
    basis = np.linalg.qr(centred.T)[0]
    [(weight, bias)] = discriminants(centred @ basis, truth, 3, [choice.shrinkage])
    others = clusters(99, 80) * scales
    expected = (others - features.mean(axis=0)) / scales @ basis @ weight.T + bias
    np.testing.assert_allclose(head.logits(others), expected, atol=1e-2)
    assert (head.logits(others).argmax(axis=1) == np.arange(99) % 3).mean() > 0.9


def test_held_out_pictures_are_not_fitted_to() -> None:
    """Thirty features separate forty pictures of noise if the fit has seen them."""
    features = clusters(40, 30, distance=0.0)
    truth = np.arange(40) % 2
    folds = np.arange(40) // 2 % 5
    centred = features - features.mean(axis=0)
    [(weight, bias)] = discriminants(centred, truth, 2, [SHRINKAGES[-1]])
    choice = choose_shrinkage(centred, truth, folds, 2)
    assert ((centred @ weight.T + bias).argmax(axis=1) == truth).mean() > 0.9
    assert (choice.scores.argmax(axis=1) == truth[choice.rows]).mean() < 0.8
    assert choice.rows.tolist() == list(range(40))
    right = choice.scores[np.arange(40), truth[choice.rows]]
    assert -np.log(right).mean() > 0.6
    some = choose_shrinkage(centred, truth, np.where(folds == 0, 0, -1), 2)
    assert some.rows.tolist() == np.flatnonzero(folds == 0).tolist()


def test_many_pictures_need_less_shrinkage() -> None:
    """The classes differ only along the axis that varies least."""
    truth = np.arange(3000) % 2
    noise = np.random.default_rng(0).normal(size=(3000, 20)) * np.linspace(0.1, 3, 20)
    noise[:, 0] += 0.3 * truth
    features = noise.astype(np.float32)
    few = fit_head(features[:12], truth[:12], "ab")[1]
    many = fit_head(features, truth, "ab")[1]
    assert few.shrinkage > many.shrinkage
    assert many.shrinkage == SHRINKAGES[-1]
    assert (many.scores.argmax(axis=1) == truth).mean() > 0.9
    assert many.temperature != 1.0


def test_a_class_with_one_picture_is_answered() -> None:
    features = clusters(600, 40, distance=4.0)
    truth = np.arange(600) % 3
    taught = np.concatenate(
        [np.flatnonzero(truth == label)[:count] for label, count in ((0, 30), (1, 30), (2, 1))]
    )
    head, _ = fit_head(features[taught], truth[taught], "abc")
    others = features[300:]
    answers = head.logits(others).argmax(axis=1)
    assert [(answers[label::3] == label).mean() > 0.7 for label in range(3)] == [True] * 3


def test_equal_pictures_of_a_class_can_be_fitted() -> None:
    features = np.repeat(np.eye(4, dtype=np.float32)[:2], 3, axis=0)
    head, choice = fit_head(features, np.repeat([0, 1], 3), "ab")
    assert head.logits(features).argmax(axis=1).tolist() == [0, 0, 0, 1, 1, 1]
    assert np.isfinite(choice.scores).all()


@pytest.mark.parametrize("pictures", [np.zeros((3, 4)), np.ones((3, 4)), np.eye(4)[:3]])
def test_equal_classes_are_equally_likely(pictures: NDArray[np.float64]) -> None:
    """The classes have the same pictures, which may all be one."""
    features = np.tile(pictures, (2, 1)).astype(np.float32)
    head, choice = fit_head(features, np.repeat([0, 1], 3), "ab")
    np.testing.assert_allclose(head.scores(head.logits(features)), 0.5, atol=1e-3)
    assert np.isfinite(choice.scores).all()


def test_each_class_is_spread_over_all_folds() -> None:
    truth = np.repeat([0, 1, 2], [20, 11, 1])
    folds = draw_folds(truth, 3, seed=0)
    assert folds[-1] == -1, "the only one of its class is always fitted to"
    for number in range(2):
        counts = np.bincount(folds[truth == number], minlength=FOLDS)
        assert counts.max() - counts.min() <= 1


def test_equal_pictures_give_an_equal_head() -> None:
    features = clusters(60)
    truth = np.arange(60) % 3
    (first, one), (second, two) = (fit_head(features, truth, "abc") for _ in range(2))
    assert first.weight is not None
    assert second.weight is not None
    assert np.array_equal(first.weight, second.weight)
    assert np.array_equal(one.scores, two.scores)
    assert not np.array_equal(draw_folds(truth, 3, seed=0), draw_folds(truth, 3, seed=1))
