"""Policies that choose random operations for each image of a batch.

TrivialAugment: Müller and Hutter 2021, https://arxiv.org/abs/2103.10158, table 1 (the "RA" space that they use
beside the wide one). RandAugment: Cubuk et al. 2019, https://arxiv.org/abs/1909.13719.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model.training.augment.image_operations import OPERATIONS, apply_operations

MAX_MAGNITUDE: Final = 10.0
"""The magnitude at which operations have their full strength."""


def trivial_augment(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Change each image with `probability` by one operation out of `OPERATIONS`, of evenly drawn strength.

    Args:
        images: uint8 [B, C, H, W]; C is 3 (red, green, blue) or 1.
        probability: 0...1.
        generator: on the images' device.

    Returns:
        uint8, same shape; a new tensor unless `probability` is 0.
    """
    if probability == 0:
        return images
    device, count = images.device, len(images)
    choice = torch.randint(0, len(OPERATIONS), (count,), generator=generator, device=device)
    strength = 2 * torch.rand((count,), generator=generator, device=device) - 1
    changed = torch.rand((count,), generator=generator, device=device) < probability
    return apply_operations(images, torch.where(changed, choice, -1), strength)


def rand_augment(images: Tensor, operations: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """Change each image by some operations out of `OPERATIONS`, one after the other, each drawn anew.

    Args:
        images, generator: as `trivial_augment`.
        operations: how many; 0 or more.
        magnitude: 0...`MAX_MAGNITUDE`; its sign is drawn for each image and operation.

    Returns:
        uint8, same shape; a new tensor unless `operations` is 0.
    """
    device, count = images.device, len(images)
    for _ in range(operations):
        choice = torch.randint(0, len(OPERATIONS), (count,), generator=generator, device=device)
        sign = 2 * torch.randint(0, 2, (count,), generator=generator, device=device) - 1
        images = apply_operations(images, choice, sign * (magnitude / MAX_MAGNITUDE))
    return images
