from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from model.training.augment.augment import ENLARGED, random_resample


def picture() -> torch.Tensor:
    """Smooth shapes with sharp edges: uint8 [3, 24, 32]."""
    rows, columns = np.mgrid[0:24, 0:32]
    planes = [
        128 + 100 * np.sin(columns / 3),
        np.where(rows > 11, 230, 20),
        np.where((rows - 12) ** 2 + (columns - 16) ** 2 < 50, 255, 0),
    ]
    return torch.from_numpy(np.stack(planes).astype(np.uint8))


def test_it_is_what_pillow_does() -> None:
    image = picture()
    pillow = Image.fromarray(image.permute(1, 2, 0).numpy())
    large = pillow.resize((ENLARGED * 32, ENLARGED * 24), Image.Resampling.BICUBIC)
    expected = np.asarray(large.resize((32, 24), Image.Resampling.BICUBIC)).astype(int)
    [got] = random_resample(image[None], 1.0, torch.Generator().manual_seed(0))
    difference = np.abs(got.permute(1, 2, 0).numpy().astype(int) - expected)
    assert difference.max() <= 6  # Pillow rounds after each of its four passes
    assert difference.mean() < 0.5
    assert np.abs(expected - image.permute(1, 2, 0).numpy()).max() > 20  # there was something to blur


def test_only_the_chosen_share_is_changed() -> None:
    images = picture().expand(400, -1, -1, -1).contiguous()
    got = random_resample(images, 0.25, torch.Generator().manual_seed(0))
    changed = (got != images).flatten(1).any(dim=1).float().mean().item()
    assert changed == pytest.approx(0.25, abs=0.07)
    assert torch.equal(images, picture().expand(400, -1, -1, -1))


def test_nothing_is_drawn_where_it_is_off() -> None:
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    images = picture()[None]
    assert random_resample(images, 0.0, generator) is images
    assert torch.equal(generator.get_state(), before)
