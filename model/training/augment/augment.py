"""Augmentation of whole batches that are already tensors, without workers and without decoding a picture twice."""

from __future__ import annotations

import torch
from torch import Tensor

from model.training.augment.policies import rand_augment, trivial_augment
from model.training.augment.resample import random_resample
from model.training.augment.resized_crop import random_resized_crop
from model.training.recipe import Augmentation


def augment(
    images: Tensor, size: tuple[int, int], augmentation: Augmentation, generator: torch.Generator, progress: float = 0.0
) -> Tensor:
    """Augment a batch before it is normalised, in the recipe's order.

    Args:
        images: uint8 [B, C, H, W].
        size: (rows, columns) of the model's input; not above H, W unless crops are resized.
        generator: on the images' device.
        progress: share of the schedule that was done when the epoch began.

    Returns:
        uint8 [B, C, *size].
    """
    if augmentation.resized_crop:
        images = random_resized_crop(images, size, augmentation.resized_crop, generator)
    else:
        images = random_crop(images, augmentation.crop_padding, generator, size)
    if augmentation.flip:
        images = random_flip(images, generator)
    if progress >= augmentation.resample_since:
        images = random_resample(images, augmentation.resample, generator)
    images = trivial_augment(images, augmentation.trivial_augment, generator)
    return rand_augment(images, augmentation.rand_augment, augmentation.rand_augment_magnitude, generator)


def random_crop(
    images: Tensor, padding: int, generator: torch.Generator, size: tuple[int, int] | None = None
) -> Tensor:
    """Cut a random part out of each image, after `padding` pixels of black were put around it (He et al. 2015, 4.2).

    Args:
        images: [B, C, H, W], any dtype.
        padding: pixels, 0 or more.
        generator: on the images' device.
        size: (rows, columns) of the result, not above the padded images'; None: H, W.

    Returns:
        [B, C, *size], same dtype; a new tensor unless there is nothing to do.
    """
    count, channels, height, width = images.shape
    rows, columns = size or (height, width)
    if padding == 0 and (rows, columns) == (height, width):
        return images
    device = images.device
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top = torch.randint(0, height + 2 * padding - rows + 1, (count, 1), generator=generator, device=device)
    left = torch.randint(0, width + 2 * padding - columns + 1, (count, 1), generator=generator, device=device)
    row = top + torch.arange(rows, device=device)  # [B, rows]
    column = left + torch.arange(columns, device=device)  # [B, columns]
    each = torch.arange(count, device=device)[:, None, None, None]
    plane = torch.arange(channels, device=device)[None, :, None, None]
    return padded[each, plane, row[:, None, :, None], column[:, None, None, :]]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image of [B, C, H, W] left to right with probability one half, into a new tensor."""
    flip = torch.rand((len(images), 1, 1, 1), generator=generator, device=images.device) < 0.5
    return torch.where(flip, images.flip(-1), images)
