"""Deletion and insertion on a model whose relevance is known: it is linear in the means of the patches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.evaluation import faithfulness
from model.evaluation.faithfulness import blur, deletion, insertion, patch_counts, patch_order, replace_patches

GRID = (3, 5)
PATCH = 4
WEIGHTS = torch.tensor([[7, 1, 0, 2, 0], [0, 12, 3, 0, 1], [4, 0, 0, 5, 0]]) / 35
"""What each patch adds to the score of class 1; on a white picture they add up to 1."""


def patch_means(pixels: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(pixels.mean(dim=1), PATCH)


def linear_score(pixels: Tensor) -> Tensor:
    right = (patch_means(pixels) * WEIGHTS).sum(dim=(1, 2))
    return torch.stack((1 - right, right), dim=1)


WHITE = torch.ones(3, GRID[0] * PATCH, GRID[1] * PATCH)


def test_deletion_has_the_area_that_paper_and_pencil_give() -> None:
    # All 15 patches in descending order: 12, 7, 5, 4, 3, 2, 1, 1 of 35, then nothing more to lose.
    scores = [35, 23, 16, 11, 7, 4, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    area = (sum(scores) - (scores[0] + scores[-1]) / 2) / 35 / 15
    assert deletion(linear_score, WHITE, WEIGHTS, 1, steps=15) == pytest.approx(area, abs=1e-6)
    # Three steps of five patches: 1, then 4/35, then 0.
    assert deletion(linear_score, WHITE, WEIGHTS, 1, steps=3) == pytest.approx((0.5 + 4 / 35) / 3, abs=1e-6)
    # The other class gains what this one loses.
    assert deletion(linear_score, WHITE, WEIGHTS, 0, steps=3) == pytest.approx(1 - (0.5 + 4 / 35) / 3, abs=1e-6)


def test_insertion_has_the_area_that_paper_and_pencil_give() -> None:
    black = torch.zeros_like(WHITE)
    area = insertion(linear_score, WHITE, black, WEIGHTS, 1, steps=3)
    assert area == pytest.approx((31 / 35 + 1 + 0.5) / 3, abs=1e-6)
    # A white picture is white when it is blurred: there is nothing to insert.
    assert insertion(linear_score, WHITE, blur(WHITE), WEIGHTS, 1) == pytest.approx(1, abs=1e-5)


def test_the_true_relevance_is_better_than_noise_and_noise_better_than_the_reverse() -> None:
    noise = torch.rand(GRID, generator=torch.Generator().manual_seed(0))
    lowered = [deletion(linear_score, WHITE, relevance, 1) for relevance in (WEIGHTS, noise, -WEIGHTS)]
    assert lowered == sorted(lowered)
    black = torch.zeros_like(WHITE)
    raised = [insertion(linear_score, WHITE, black, relevance, 1) for relevance in (WEIGHTS, noise, -WEIGHTS)]
    assert raised == sorted(raised, reverse=True)
    assert min(lowered[1] / lowered[0], lowered[2] / lowered[1], raised[0] / raised[1], raised[1] / raised[2]) > 1.1


def test_large_and_small_batches_give_the_same_area(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def score(pixels: Tensor) -> Tensor:
        sizes.append(len(pixels))
        return linear_score(pixels)

    whole = deletion(score, WHITE, WEIGHTS, 1, steps=15)
    monkeypatch.setattr(faithfulness, "BATCH", 3)
    assert deletion(score, WHITE, WEIGHTS, 1, steps=15) == pytest.approx(whole, abs=1e-9)
    assert sizes == [16, 3, 3, 3, 3, 3, 1]


def test_patches_of_equal_value_are_taken_row_by_row() -> None:
    assert patch_order(torch.tensor([[0.0, 2.0, 1.0], [2.0, 0.0, 1.0]])).tolist() == [1, 3, 2, 5, 0, 4]
    assert patch_order(torch.zeros(40, 40)).tolist() == list(range(1600))


@pytest.mark.parametrize(
    ("patches", "steps", "counts"), [(4, 4, [0, 1, 2, 3, 4]), (196, 4, [0, 49, 98, 147, 196]), (2, 28, [0, 1, 2])]
)
def test_steps_are_even_and_no_more_than_patches(patches: int, steps: int, counts: list[int]) -> None:
    assert patch_counts(patches, steps).tolist() == counts


def test_whole_patches_are_replaced_and_nothing_else() -> None:
    changed = replace_patches(
        WHITE, torch.zeros(()), torch.tensor([6, 0, *range(1, 6), *range(7, 15)]), torch.tensor([0, 2]), GRID
    )
    assert torch.equal(changed[0], WHITE)
    expected = torch.ones(GRID)
    expected[0, 0] = expected[1, 1] = 0
    assert torch.equal(patch_means(changed)[1], expected)
    assert changed[1].eq(0).sum() == 2 * 3 * PATCH**2


def test_a_blur_keeps_even_pictures_and_spreads_a_point_evenly() -> None:
    torch.testing.assert_close(blur(WHITE), WHITE)
    point = torch.zeros(1, 65, 97)
    point[0, 32, 48] = 1
    spread = blur(point)[0]
    assert float(spread.sum()) == pytest.approx(1, abs=1e-5)
    assert spread.argmax() == point.argmax()
    torch.testing.assert_close(spread, spread.flip(0).flip(1))
    down, across = torch.arange(65.0) - 32, torch.arange(97.0) - 48
    deviations = [
        float((spread.sum(dim=1) * down**2).sum() ** 0.5),
        float((spread.sum(dim=0) * across**2).sum() ** 0.5),
    ]
    assert deviations == pytest.approx([65 / 16] * 2, rel=0.03)
    assert blur(torch.rand(3, 1, 2)).isfinite().all()
