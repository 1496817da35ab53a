"""Images enlarged and shrunk to their size again, which blurs them slightly, as pictures that users send are."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ENLARGED: Final = 4
"""Factor by which the sides grow; a larger one hardly changes the result."""


def random_resample(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Enlarge some images by bicubic interpolation and shrink them to their size again, as Pillow does both.

    Args:
        images: uint8 [B, C, H, W].
        probability: share of the images, 0...1.
        generator: on the images' device.

    Returns:
        uint8, same shape; a new tensor unless `probability` is 0.
    """
    if probability == 0:
        return images
    chosen = (torch.rand((len(images),), generator=generator, device=images.device) < probability).nonzero().squeeze(1)
    result = images.clone()
    if len(chosen):
        height, width = images.shape[2:]
        large = _resize(images[chosen].float(), (ENLARGED * height, ENLARGED * width))
        # Pillow rounds after each pass along one axis, which this does not.
        result[chosen] = _resize(large, (height, width)).round().clamp(0, 255).to(torch.uint8)
    return result


def _resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    # Only with `antialias` is torch's bicubic kernel Pillow's (a = -0.5), enlarging included.
    return F.interpolate(images, size=size, mode="bicubic", antialias=True).clamp(0, 255)
