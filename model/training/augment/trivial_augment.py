"""TrivialAugment: one random operation of random strength for each image, on whole batches of tensors.

Müller and Hutter 2021, https://arxiv.org/abs/2103.10158, table 1 (the "RA" space that they use beside
the wide one): fourteen operations, strengths drawn evenly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.training.augment.image_operations import OPERATIONS, apply_operations


def trivial_augment(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Change each image with `probability` by one operation out of `OPERATIONS`.

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
