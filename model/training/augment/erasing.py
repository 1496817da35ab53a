"""Random erasing (Zhong et al. 2017, https://arxiv.org/abs/1708.04896; timm's `timm/data/random_erasing.py`)."""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from model.training.augment.boxes import random_boxes

_SHARE: Final = (0.02, 1 / 3)
_RATIO: Final = (0.3, 1 / 0.3)


def random_erasing(
    pixels: Tensor, probability: float, fill: Literal["pixel", "mean"], generator: torch.Generator
) -> Tensor:
    """Fill one rectangle of 2 % to 33 % of the area in some of the images.

    Args:
        pixels: float32 [B, C, H, W], normalised: mean 0 and standard deviation 1 over the training pictures.
        probability: of each image to be changed, 0...1.
        fill: `pixel` is standard normal noise in every pixel and channel, `mean` is 0.
        generator: on the pixels' device.

    Returns:
        Same shape; a new tensor unless `probability` is 0.
    """
    if probability == 0:
        return pixels
    count, _, rows, columns = pixels.shape
    boxes = random_boxes(count, (rows, columns), _SHARE, _RATIO, generator)
    changed = torch.rand((count, 1, 1, 1), generator=generator, device=pixels.device) < probability
    erased = boxes.mask((rows, columns)) & changed
    if fill == "mean":
        return pixels.masked_fill(erased, 0.0)
    return torch.where(erased, torch.randn(pixels.shape, generator=generator, device=pixels.device), pixels)
