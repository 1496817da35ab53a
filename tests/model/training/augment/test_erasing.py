from __future__ import annotations

import pytest
import torch

from model.training.augment.augment import random_erasing


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("channels", [1, 3])
def test_one_rectangle_of_bounded_area_is_set_to_the_mean_in_the_told_share_of_images(channels: int) -> None:
    pixels = torch.full((1000, channels, 32, 40), 5.0)
    erased = random_erasing(pixels, 0.25, "mean", seeded()).eq(0)
    changed = erased.flatten(1).any(dim=1)
    assert changed.float().mean() == pytest.approx(0.25, abs=0.05)
    assert torch.equal(erased.any(dim=1), erased.all(dim=1))  # the same place in all channels
    places = erased[changed, 0]
    rows, columns = places.any(dim=2), places.any(dim=1)
    assert torch.equal(places, rows[:, :, None] & columns[:, None, :])
    area = places.float().mean(dim=(1, 2))
    assert 0.01 < area.min() < 0.05
    assert 0.28 < area.max() < 0.36


def test_noise_is_standard_normal_in_every_pixel_and_the_rest_stays() -> None:
    pixels = torch.full((200, 3, 32, 32), 50.0)
    result = random_erasing(pixels, 1.0, "pixel", seeded())
    noise = result[result != 50]
    assert noise.numel() > 0.1 * result.numel()
    assert noise.mean() == pytest.approx(0.0, abs=0.02)
    assert noise.std() == pytest.approx(1.0, abs=0.02)
    assert noise.unique().numel() > 0.9 * noise.numel()
    assert pixels.eq(50).all()


def test_erasing_that_is_off_returns_its_input() -> None:
    pixels = torch.zeros((2, 3, 8, 8))
    assert random_erasing(pixels, 0.0, "pixel", seeded()) is pixels
