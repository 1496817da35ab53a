"""Mixup and CutMix: pairs of images and their targets mixed in the same proportion.

Zhang et al. 2017, https://arxiv.org/abs/1710.09412, and Yun et al. 2019, https://arxiv.org/abs/1905.04899.
As in timm's `timm/data/mixup.py`, the proportion is the same for a whole batch, and the partner of its first image is
its last, and so on. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.training.augment.boxes import Boxes
from model.training.recipe import Mixing


def mix(pixels: Tensor, targets: Tensor, mixing: Mixing, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Mix a batch with itself.

    Args:
        pixels: float32 [B, C, H, W].
        targets: float32 [B, K], each row summing to 1.
        generator: on the pixels' device.

    Returns:
        New pixels and targets of the same shapes: `s * own + (1 - s) * partner`, with s a number from 0 to 1
        for each pixel, and its mean over the pixels for the targets.
    """
    size = (pixels.shape[2], pixels.shape[3])
    # Where nothing is mixed it is 1. The choice is made on the device, so that nothing waits for it.
    own = torch.ones((1, 1, *size), device=pixels.device)
    chances = torch.rand(2, generator=generator, device=pixels.device)
    if mixing.mixup:
        own = beta(mixing.mixup, generator).float().expand_as(own)
    if mixing.cutmix:
        cut = cutmix_share(size, beta(mixing.cutmix, generator), generator)
        own = torch.where(chances[0] < 0.5, cut, own) if mixing.mixup else cut
    own = torch.where(chances[1] < mixing.probability, own, 1.0)
    share = own.mean()
    return pixels * own + pixels.flip(0) * (1 - own), targets * share + targets.flip(0) * (1 - share)


def cutmix_share(size: tuple[int, int], kept: Tensor, generator: torch.Generator) -> Tensor:
    """Return the mask of what stays of an image that gets a rectangle of another image: 1 outside, 0 inside.

    Its sides are the image's times sqrt(1 - kept), its middle lies anywhere, and what hangs over the
    edge is cut off; more than `kept` of the area may therefore stay.

    Args:
        size: (rows, columns).
        kept: scalar, 0...1, on the generator's device.

    Returns:
        float32 [1, 1, rows, columns].
    """
    edges = []
    for length in size:
        half = (length * (1 - kept).sqrt()).long() // 2
        middle = torch.randint(0, length, (1,), generator=generator, device=kept.device)
        low, high = (middle - half).clamp_min(0), (middle + half).clamp_max(length)
        edges.append((low, high - low))
    (top, height), (left, width) = edges
    return 1.0 - Boxes(top, left, height, width).mask(size).float()


def beta(alpha: float, generator: torch.Generator) -> Tensor:
    """Draw from Beta(alpha, alpha): a float64 scalar on the generator's device."""
    # torch.distributions takes no generator; this is what it calls.
    shape = torch.full((2,), alpha, dtype=torch.float64, device=generator.device)
    first, second = torch._standard_gamma(shape, generator=generator).clamp_min(torch.finfo(torch.float64).tiny)
    drawn: Tensor = first / (first + second)
    return drawn
