from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig
from model.errors import DatasetError
from model.evaluation.absent import DRAWN, absent_ranks
from model.evaluation.explanations import (
    available_methods,
    cls_maps,
    estimate_mean,
    measure_explanations,
    model_evidence,
    model_score,
    random_maps,
)
from tests.model.insight.models import random_model

COUNT = 8


def picture(number: int) -> Tensor:
    """A picture whose class is its number: in the patch in the middle; the other patches differ by a little."""
    noise = torch.rand(1, 1, 5, 5, generator=torch.Generator().manual_seed(number)) / 100
    noise[0, 0, 2, 2] = number + 1
    return torch.nn.functional.interpolate(noise, size=(20, 20))[0]


def nearest_class(pixels: Tensor) -> Tensor:
    """Score classes by the brightest patch, whose brightness is the class's number."""
    brightest = torch.nn.functional.avg_pool2d(pixels[:, 0], 4).flatten(1).amax(dim=1, keepdim=True)
    return (-((brightest - 1 - torch.arange(COUNT)) ** 2) * 4).softmax(dim=1)


def brightness(pixels: Tensor, classes: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(pixels[:, 0], 4)


def whole(pixels: Tensor, classes: Tensor) -> Tensor:
    return torch.ones(len(classes))


def darkness(pixels: Tensor, classes: Tensor) -> Tensor:
    return -brightness(pixels, classes)


def test_methods_are_told_apart_and_the_same_seed_gives_the_same_numbers() -> None:
    methods = {"random": random_maps((5, 5)), "true": brightness, "reversed": darkness}
    found = measure_explanations(nearest_class, whole, methods, picture, COUNT)
    again = measure_explanations(nearest_class, whole, methods | {"random": random_maps((5, 5))}, picture, COUNT)
    assert found == again
    assert [(one.picture, one.method, one.class_index) for one in found.pictures] == [
        (number, method, number) for number in range(COUNT) for method in methods
    ]
    by_method = {result.method: result for result in found.methods()}
    assert list(by_method) == list(methods)
    lowered = [by_method[name].deletion for name in ("true", "random", "reversed")]
    raised = [by_method[name].insertion for name in ("true", "random", "reversed")]
    assert lowered[0].mean < lowered[1].low
    assert lowered[1].high < lowered[2].mean
    assert raised[0].mean > raised[1].high
    assert raised[1].low > raised[2].mean
    assert found.whole > 0.7 > found.blurred
    assert found.quarters == 4 * COUNT
    for method in methods:
        shares = [share for one in found.pictures if one.method == method for share in one.shares]
        assert len(shares) == found.counted
        mosaic = by_method[method].mosaic
        assert mosaic is not None
        assert mosaic.mean == pytest.approx(np.mean(shares))


def test_every_picture_stands_once_in_every_quarter_and_its_share_is_its_own() -> None:
    def everything_counts(pixels: Tensor) -> Tensor:
        return nearest_class(pixels) if len(pixels) > 1 else torch.ones(1, COUNT)

    def number_of_class(pixels: Tensor, classes: Tensor) -> Tensor:
        """Return a map with the share (class + 1) / 100 in the first quarter, and the rest in the last."""
        maps = torch.zeros(len(classes), 2, 2)
        maps[:, 0, 0] = (classes + 1) / 100
        maps[:, 1, 1] = 1 - maps[:, 0, 0]
        return maps

    methods = {"random": random_maps((2, 2)), "one": number_of_class}
    found = measure_explanations(everything_counts, whole, methods, picture, COUNT, steps=1)
    assert found.counted == 4 * COUNT
    for one in found.pictures[1::2]:
        share = (one.class_index + 1) / 100
        assert sorted(one.shares) == pytest.approx(sorted([0, 0, share, 1 - share]))


@pytest.mark.parametrize(("evidence", "expected"), [(1.0, 0.625), (0.2, 0.325), (0.0, 0.25)])
def test_peaks_of_absent_classes_are_those_of_maps_as_they_are_answered(evidence: float, expected: float) -> None:
    """The best class's map has its peak at 4 times the even share of 4 patches, and an absent one's at 2.5 times."""

    def of_class(pixels: Tensor, classes: Tensor) -> Tensor:
        best = nearest_class(pixels).argmax(dim=1) == classes
        peaks = torch.where(best, 1.0, 0.625)
        maps = torch.stack((peaks, *(((1 - peaks) / 3,) * 3)), dim=1)
        return maps.reshape(-1, 2, 2)

    def evidence_of(pixels: Tensor, classes: Tensor) -> Tensor:
        return torch.where(nearest_class(pixels).argmax(dim=1) == classes, 1.0, evidence)

    methods = {"random": random_maps((2, 2)), "relevance": of_class}
    found = measure_explanations(nearest_class, evidence_of, methods, picture, 3, steps=1)
    baseline, relevance = found.methods()
    assert baseline.absent is None, "it is of no class"
    assert relevance.absent is not None
    assert relevance.absent.mean == pytest.approx(expected)
    assert all(len(one.absent) == 1 + DRAWN for one in found.pictures if one.method == "relevance")


@pytest.mark.parametrize(("classes", "lowest"), [(1000, 100), (201, 100), (10, 5), (3, 1), (2, 1)])
def test_absent_classes_are_the_middle_one_and_some_of_the_lower_ranks(classes: int, lowest: int) -> None:
    for seed in range(20):
        middle, *drawn = absent_ranks(classes, np.random.default_rng(seed))
        assert middle == classes // 2
        assert len(drawn) == min(DRAWN, classes - lowest - 1)
        assert len({middle, *drawn}) == 1 + len(drawn)
        assert all(lowest <= rank < classes for rank in drawn)
    assert absent_ranks(1, np.random.default_rng(0)) == []


def test_few_pictures_have_no_mosaic_and_none_are_refused() -> None:
    few = measure_explanations(nearest_class, whole, {"true": brightness}, picture, 3)
    assert (few.quarters, few.counted) == (0, 0)
    assert few.methods()[0].mosaic is None
    with pytest.raises(DatasetError, match="no images"):
        measure_explanations(nearest_class, whole, {"true": brightness}, picture, 0)


@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_methods_of_a_network_give_maps_of_its_grid_and_scores_as_served(pool: str) -> None:
    model = random_model(pool=pool, class_token=pool == "cls")
    half = (0.5, 0.5, 0.5)
    preprocess = PreprocessConfig(
        size=(24, 40), resize="squash", resize_size=(24, 40), interpolation="bicubic", mean=half, std=half
    )
    checkpoint = Checkpoint("m", "m", "made", "vit", model.config, preprocess, ("a", "b", "c"), {}, temperature=2.0)
    pixels = torch.randn(2, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(pixels, (1,))
        torch.testing.assert_close(model_score(model, checkpoint)(pixels), (output.logits / 2).softmax(dim=1))
        best = output.logits.argmax(dim=1)
        torch.testing.assert_close(model_evidence(model, checkpoint)(pixels, best), torch.ones(2))
    for name, maps in available_methods(model).items():
        found = maps(pixels, torch.tensor([0, 2]))
        assert found.shape == (2, 3, 5), name
        assert not found.requires_grad
    row = output.attention.mean(dim=2)[:, 0, model.config.prefix_tokens :]
    torch.testing.assert_close(
        cls_maps(model)(pixels, torch.tensor([0, 2])).flatten(1), row / row.sum(dim=1, keepdim=True)
    )


def test_an_interval_is_that_of_the_mean_over_pictures() -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(5, 2, 400)
    found = estimate_mean(values, np.ones(400, np.int64))
    assert found is not None
    assert found.mean == pytest.approx(values.mean())
    half = 1.96 * values.std() / 20  # of a normal distribution
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=half / 5)
    assert found == estimate_mean(values, np.ones(400, np.int64))
    assert found != estimate_mean(values, np.ones(400, np.int64), seed=1)


def test_values_of_one_picture_are_drawn_together_and_pictures_without_any_change_nothing() -> None:
    generator = np.random.default_rng(1)
    values = generator.normal(0, 1, 100)
    apart = estimate_mean(values, np.ones(100, np.int64))
    together = estimate_mean(4 * values, np.full(100, 4))
    assert apart == pytest.approx(together)
    one = estimate_mean(np.array([0.0, 3.0, 0.0]), np.array([0, 2, 0]))
    assert one is not None
    assert tuple(one) == (1.5, 1.5, 1.5)
    assert estimate_mean(np.zeros(3), np.zeros(3, np.int64)) is None
