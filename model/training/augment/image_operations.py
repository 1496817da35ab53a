"""TrivialAugment, RandAugment, and the operations on whole batches of pictures that the two choose from.

TrivialAugment: Müller and Hutter 2021, https://arxiv.org/abs/2103.10158, table 1 (the "RA" space that they use
beside the wide one). RandAugment: Cubuk et al. 2019, https://arxiv.org/abs/1909.13719. The operations are the fourteen
of RandAugment's space, as `PIL.ImageOps` and `PIL.ImageEnhance` define them but for rounding. Geometry is bilinear;
what comes into view is black. Images have three channels (red, green, blue) or one. All operations are elementwise or
gather, so that batches may live on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_ROTATION: Final = 30.0
"""In degrees."""
MAX_SHEAR: Final = 0.3
MAX_TRANSLATION: Final = 10 / 32
"""Share of the side: ten pixels of a CIFAR image."""
MAX_ENHANCEMENT: Final = 0.9
"""Colour, contrast, brightness and sharpness are scaled by 0.1...1.9."""
MIN_POSTERIZE_BITS: Final = 4
MAX_MAGNITUDE: Final = 10.0
"""The magnitude at which RandAugment's operations have their full strength."""

Operation = Callable[[Tensor, Tensor], Tensor]
"""(float32 [B, C, H, W] of 0...255, strength [B] of -1...1) -> the same shape; not yet clamped."""


def trivial_augment(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Change each image with `probability`, 0...1, by an operation out of `OPERATIONS`, of evenly drawn strength."""
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
        operations: how many; 0 or more.
        magnitude: 0...`MAX_MAGNITUDE`; its sign is drawn for each image and operation.
    """
    device, count = images.device, len(images)
    for _ in range(operations):
        choice = torch.randint(0, len(OPERATIONS), (count,), generator=generator, device=device)
        sign = 2 * torch.randint(0, 2, (count,), generator=generator, device=device) - 1
        images = apply_operations(images, choice, sign * (magnitude / MAX_MAGNITUDE))
    return images


def apply_operations(images: Tensor, choice: Tensor, strength: Tensor) -> Tensor:
    """Change each image by the operation chosen for it.

    Args:
        choice: int64 [B], an index into `OPERATIONS`, or -1: leave the image alone.
        strength: float32 [B], -1...1.
    """
    result = images.clone()
    for index, operation in enumerate(OPERATIONS.values()):
        chosen = (choice == index).nonzero().squeeze(1)
        if len(chosen):
            changed = operation(images[chosen].float(), strength[chosen])
            result[chosen] = changed.clamp(0, 255).round().to(torch.uint8)
    return result


def _each(strength: Tensor) -> Tensor:
    return strength[:, None, None, None]


def _identity(x: Tensor, strength: Tensor) -> Tensor:
    return x


def _auto_contrast(x: Tensor, strength: Tensor) -> Tensor:
    low, high = x.amin(dim=(2, 3), keepdim=True), x.amax(dim=(2, 3), keepdim=True)
    return torch.where(high > low, (x - low) * 255 / (high - low).clamp_min(1), x)


def _equalize(x: Tensor, strength: Tensor) -> Tensor:
    """Flatten each channel's histogram, as `PIL.ImageOps.equalize` does it."""
    count, channels, height, width = x.shape
    values = x.long().reshape(count * channels, height * width)
    histogram = torch.zeros((count * channels, 256), dtype=torch.int64, device=x.device)
    histogram.scatter_add_(1, values, torch.ones_like(values))
    last = 255 - histogram.flip(1).ne(0).int().argmax(dim=1, keepdim=True)
    step = (height * width - histogram.gather(1, last)) // 255
    below = histogram.cumsum(dim=1) - histogram
    table = ((below + step // 2) // step.clamp_min(1)).clamp(0, 255)
    equalized = table.gather(1, values).reshape(x.shape).float()
    return torch.where(step.reshape(count, channels, 1, 1) > 0, equalized, x)


def _solarize(x: Tensor, strength: Tensor) -> Tensor:
    return torch.where(x >= 255 * (1 - _each(strength).abs()), 255 - x, x)


def _posterize(x: Tensor, strength: Tensor) -> Tensor:
    bits = 8 - (_each(strength).abs() * (8 - MIN_POSTERIZE_BITS)).round()
    step = 2 ** (8 - bits)
    return (x / step).floor() * step


def _blend(x: Tensor, other: Tensor, strength: Tensor) -> Tensor:
    return other + (1 + MAX_ENHANCEMENT * _each(strength)) * (x - other)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device).reshape(1, 3, 1, 1)  # ITU-R BT.601
    return (x * weights).sum(dim=1, keepdim=True)


def _colour(x: Tensor, strength: Tensor) -> Tensor:
    return _blend(x, _grey(x), strength)


def _contrast(x: Tensor, strength: Tensor) -> Tensor:
    return _blend(x, _grey(x).mean(dim=(1, 2, 3), keepdim=True), strength)


def _brightness(x: Tensor, strength: Tensor) -> Tensor:
    return _blend(x, torch.zeros_like(x), strength)


def _sharpness(x: Tensor, strength: Tensor) -> Tensor:
    """Move away from or towards the image smoothed by `PIL.ImageFilter.SMOOTH`; the border stays."""
    channels = x.shape[1]
    kernel = torch.tensor([[1.0, 1.0, 1.0], [1.0, 5.0, 1.0], [1.0, 1.0, 1.0]], device=x.device) / 13
    smooth = x.clone()
    smooth[:, :, 1:-1, 1:-1] = F.conv2d(x, kernel.expand(channels, 1, 3, 3), groups=channels)
    return _blend(x, smooth, strength)


def _affine(x: Tensor, matrix: Tensor) -> Tensor:
    """Resample images; `matrix` [B, 2, 3] takes output places to input places, both -1...1 across the image."""
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _unit(count: int, device: torch.device) -> Tensor:
    return torch.eye(2, 3, device=device).repeat(count, 1, 1)


def _rotate(x: Tensor, strength: Tensor) -> Tensor:
    angle = strength * math.radians(MAX_ROTATION)
    aspect = x.shape[2] / x.shape[3]
    matrix = _unit(len(x), x.device)
    matrix[:, 0, 0] = matrix[:, 1, 1] = angle.cos()
    matrix[:, 0, 1] = angle.sin() * aspect
    matrix[:, 1, 0] = -angle.sin() / aspect
    return _affine(x, matrix)


def _affine_by(row: int, column: int, factor: float) -> Operation:
    """Make an operation that sets one element of the identity's matrix to its strength times `factor`."""

    def operation(x: Tensor, strength: Tensor) -> Tensor:
        matrix = _unit(len(x), x.device)
        matrix[:, row, column] = strength * factor
        return _affine(x, matrix)

    return operation


OPERATIONS: Final[dict[str, Operation]] = {
    "identity": _identity,
    "auto_contrast": _auto_contrast,
    "equalize": _equalize,
    "solarize": _solarize,
    "posterize": _posterize,
    "colour": _colour,
    "contrast": _contrast,
    "brightness": _brightness,
    "sharpness": _sharpness,
    "rotate": _rotate,
    "shear_x": _affine_by(0, 1, MAX_SHEAR),
    "shear_y": _affine_by(1, 0, MAX_SHEAR),
    "translate_x": _affine_by(0, 2, 2 * MAX_TRANSLATION),  # the image spans 2 units
    "translate_y": _affine_by(1, 2, 2 * MAX_TRANSLATION),
}
