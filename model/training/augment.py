"""Augmentation of whole batches that are already tensors: no workers, no pictures decoded twice."""

from __future__ import annotations

import torch
from torch import Tensor


def random_crop(images: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Shift each image by up to `padding` pixels either way; what comes into view is black.

    The same as padding by `padding` and cropping at random to the old size (He et al. 2015, section 4.2).

    Args:
        images: [B, C, H, W], any dtype.
        padding: pixels, 0 or more.
        generator: on the images' device.

    Returns:
        A new tensor, same shape and dtype.
    """
    if padding == 0:
        return images
    count, channels, height, width = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top = torch.randint(0, 2 * padding + 1, (count, 1), generator=generator, device=device)
    left = torch.randint(0, 2 * padding + 1, (count, 1), generator=generator, device=device)
    rows = top + torch.arange(height, device=device)  # [B, H]
    columns = left + torch.arange(width, device=device)  # [B, W]
    each = torch.arange(count, device=device)[:, None, None, None]
    plane = torch.arange(channels, device=device)[None, :, None, None]
    return padded[each, plane, rows[:, None, :, None], columns[:, None, None, :]]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half.

    Args:
        images: [B, C, H, W], any dtype.
        generator: on the images' device.

    Returns:
        A new tensor, same shape and dtype.
    """
    flip = torch.rand((len(images), 1, 1, 1), generator=generator, device=images.device) < 0.5
    return torch.where(flip, images.flip(-1), images)
