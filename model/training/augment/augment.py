"""Augmentation of whole batches that are already tensors, without workers and without decoding a picture twice.

In this folder `images` are uint8 [B, C, H, W], and the result is uint8 [B, C, H, W], too, where nothing else is said: a
new tensor unless there is nothing to do. A `generator` is on the device of the batch.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from model.training.augment.boxes import random_boxes, random_resized_crop
from model.training.augment.image_operations import rand_augment, trivial_augment
from model.training.recipe import Augmentation

ENLARGED: Final = 4
"""Factor by which `random_resample` enlarges the sides; a larger factor hardly changes the result."""
_ERASED_SHARE: Final = (0.02, 1 / 3)
_ERASED_RATIO: Final = (0.3, 1 / 0.3)


def augment(
    images: Tensor, size: tuple[int, int], augmentation: Augmentation, generator: torch.Generator, progress: float = 0.0
) -> Tensor:
    """Augment a batch before it is normalised, in the recipe's order.

    Args:
        size: (rows, columns) of the model's input, and of the result; not above H, W unless crops are resized.
        progress: share of the schedule that was done when the epoch began.
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


def random_crop(images: Tensor, padding: int, generator: torch.Generator, size: tuple[int, int]) -> Tensor:
    """Cut a random part out of each image, after `padding` pixels of black were put around it (He et al. 2015, 4.2).

    `size` is the (rows, columns) of the result, not above the padded images'.
    """
    count, channels, height, width = images.shape
    rows, columns = size
    if padding == 0 and (rows, columns) == (height, width):
        return images
    device = images.device
    padded = F.pad(images, (padding,) * 4)
    top = torch.randint(0, height + 2 * padding - rows + 1, (count, 1), generator=generator, device=device)
    left = torch.randint(0, width + 2 * padding - columns + 1, (count, 1), generator=generator, device=device)
    row = top + torch.arange(rows, device=device)  # [B, rows]
    column = left + torch.arange(columns, device=device)  # [B, columns]
    each = torch.arange(count, device=device)[:, None, None, None]
    plane = torch.arange(channels, device=device)[None, :, None, None]
    return padded[each, plane, row[:, None, :, None], column[:, None, None, :]]


def random_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with a probability of a half."""
    flip = torch.rand((len(images), 1, 1, 1), generator=generator, device=images.device) < 0.5
    return torch.where(flip, images.flip(-1), images)


def random_resample(images: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Enlarge some images by bicubic interpolation and shrink them to their size again, as Pillow does both.

    This blurs them slightly, as pictures that users send are. `probability` is the share of the images, 0...1.
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


def random_erasing(
    pixels: Tensor, probability: float, fill: Literal["pixel", "mean"], generator: torch.Generator
) -> Tensor:
    """Fill a rectangle of 2 % to 33 % of the area in some of the images.

    Zhong et al. 2017, https://arxiv.org/abs/1708.04896; timm's `timm/data/random_erasing.py`.

    Args:
        pixels: float32 [B, C, H, W], normalised: mean 0 and standard deviation 1 over the training pictures.
        probability: of each image to be changed, 0...1.
        fill: `pixel` is standard normal noise in every pixel and channel, `mean` is 0.
    """
    if probability == 0:
        return pixels
    count, _, rows, columns = pixels.shape
    boxes = random_boxes(count, (rows, columns), _ERASED_SHARE, _ERASED_RATIO, generator)
    changed = torch.rand((count, 1, 1, 1), generator=generator, device=pixels.device) < probability
    erased = boxes.mask((rows, columns)) & changed
    if fill == "mean":
        return pixels.masked_fill(erased, 0.0)
    return torch.where(erased, torch.randn(pixels.shape, generator=generator, device=pixels.device), pixels)
