"""RandAugment: a few random operations of one strength for each image, on whole batches of tensors.

Cubuk et al. 2019, https://arxiv.org/abs/1909.13719.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model.training.augment.image_operations import OPERATIONS, apply_operations

MAX_MAGNITUDE: Final = 10.0
"""The magnitude at which operations have their full strength."""


def rand_augment(images: Tensor, operations: int, magnitude: float, generator: torch.Generator) -> Tensor:
    """Change each image by some operations out of `OPERATIONS`, one after the other, each drawn anew.

    Args:
        images: uint8 [B, C, H, W]; C is 3 (red, green, blue) or 1.
        operations: how many; 0 or more.
        magnitude: 0...`MAX_MAGNITUDE`; whether it goes one way or the other (darker or brighter, left or
            right) is drawn for each image and operation.
        generator: on the images' device.

    Returns:
        uint8, same shape; a new tensor unless `operations` is 0.
    """
    device, count = images.device, len(images)
    for _ in range(operations):
        choice = torch.randint(0, len(OPERATIONS), (count,), generator=generator, device=device)
        sign = 2 * torch.randint(0, 2, (count,), generator=generator, device=device) - 1
        images = apply_operations(images, choice, sign * (magnitude / MAX_MAGNITUDE))
    return images
