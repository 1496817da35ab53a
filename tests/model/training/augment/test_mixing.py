from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.training.augment.mixing import beta, cutmix_share, mix
from model.training.recipe import Mixing

CLASSES = 6


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(channels: int = 3, size: tuple[int, int] = (16, 24)) -> tuple[Tensor, Tensor]:
    """Six flat images whose value is their class, and their one-hot targets."""
    values = torch.arange(CLASSES)
    pixels = values.float().reshape(-1, 1, 1, 1).expand(-1, channels, *size).contiguous()
    return pixels, F.one_hot(values, CLASSES).float()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("channels", [1, 3])
def test_mixup_blends_all_pixels_and_targets_in_one_proportion(seed: int, channels: int) -> None:
    pixels, targets = batch(channels)
    mixed, soft = mix(pixels, targets, Mixing(mixup=0.8), seeded(seed))
    share = soft[0, 0]
    assert 0 < share < 1
    torch.testing.assert_close(mixed, share * pixels + (1 - share) * pixels.flip(0))
    torch.testing.assert_close(soft, share * targets + (1 - share) * targets.flip(0))
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(CLASSES))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("channels", [1, 3])
def test_the_targets_of_cutmix_are_the_areas_of_the_images(seed: int, channels: int) -> None:
    pixels, targets = batch(channels)
    mixed, soft = mix(pixels, targets, Mixing(cutmix=1.0), seeded(seed))
    for own in range(CLASSES):
        for present in (own, CLASSES - 1 - own):
            assert (mixed[own] == present).float().mean() == pytest.approx(float(soft[own, present]), abs=1e-6)
    torch.testing.assert_close(soft.sum(dim=1), torch.ones(CLASSES))


def test_what_cutmix_puts_in_is_one_rectangle_with_the_images_proportions_cut_at_the_edge() -> None:
    generator = seeded()
    seen_edge = False
    for _ in range(200):
        foreign = cutmix_share((40, 80), torch.tensor(0.75, dtype=torch.float64), generator)[0, 0].eq(0)
        rows, columns = foreign.any(dim=1), foreign.any(dim=0)
        assert torch.equal(foreign, rows[:, None] & columns[None, :])
        assert 10 <= rows.sum() <= 20  # half of the side where it fits, at least half of that at an edge
        assert 20 <= columns.sum() <= 40
        seen_edge |= bool(rows.sum() < 20)
    assert seen_edge


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_proportions_follow_the_beta_distribution(alpha: float) -> None:
    generator = seeded()
    draws = torch.stack([beta(alpha, generator) for _ in range(2000)])
    assert draws.min() >= 0
    assert draws.max() <= 1
    assert draws.mean() == pytest.approx(0.5, abs=0.03)
    assert draws.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.1)


def test_each_batch_takes_one_of_the_two_or_none() -> None:
    pixels, targets = batch()
    kinds = {"mixup": 0, "cutmix": 0, "neither": 0}
    generator = seeded()
    for _ in range(400):
        mixed, soft = mix(pixels, targets, Mixing(mixup=1.0, cutmix=1.0, probability=0.6), generator)
        if torch.equal(mixed, pixels):
            assert torch.equal(soft, targets)
            kinds["neither"] += 1
        else:
            kinds["cutmix" if torch.equal(mixed, mixed.round()) else "mixup"] += 1
    assert kinds["neither"] / 400 == pytest.approx(0.4, abs=0.1)
    assert kinds["mixup"] / 400 == pytest.approx(0.3, abs=0.1)


def test_mixing_follows_its_generator_and_leaves_its_input_alone() -> None:
    pixels, targets = batch()
    before = pixels.clone()
    mixing = Mixing(mixup=0.8, cutmix=1.0)
    first, again, other = (mix(pixels, targets, mixing, seeded(s))[0] for s in (1, 1, 2))
    assert torch.equal(pixels, before)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
