"""Random resized crops of whole batches, antialiased.

Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6; torchvision's `RandomResizedCrop`.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from model.training.augment.boxes import Boxes, random_boxes

_RATIO: Final = (3 / 4, 4 / 3)


def random_resized_crop(
    images: Tensor, size: tuple[int, int], least_share: float, generator: torch.Generator
) -> Tensor:
    """Resize a random part of each image to `size`.

    Args:
        images: uint8 [B, C, H, W].
        size: (rows, columns) of the result.
        least_share: of an image's area that its part covers, above 0 and up to 1.
        generator: on the images' device.

    Returns:
        uint8 [B, C, *size], a new tensor. Where no part of an allowed shape was drawn (very long
        images), it is the largest part of allowed shape in the middle, as in torchvision.
    """
    rows, columns = images.shape[2:]
    drawn = random_boxes(len(images), (rows, columns), (least_share, 1.0), _RATIO, generator)
    height = min(rows, round(columns / _RATIO[0]))
    width = min(columns, round(rows * _RATIO[1]))
    middle = ((rows - height) // 2, (columns - width) // 2, height, width)
    fitted = drawn.height > 0
    boxes = Boxes(*(torch.where(fitted, edge, default) for edge, default in zip(drawn, middle, strict=True)))
    return resize_boxes(images, boxes, size)


def resize_boxes(images: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Cut a box, none empty, out of each image and resize it with PIL's antialiased bilinear filter.

    The filter is separable, so that each axis is one matrix product for the whole batch.

    Args:
        images: uint8 [B, C, H, W].
        size: (rows, columns) of the result.

    Returns:
        uint8 [B, C, *size].
    """
    down = _resampling(boxes.top, boxes.height, images.shape[2], size[0])
    across = _resampling(boxes.left, boxes.width, images.shape[3], size[1])
    resized = down.unsqueeze(1) @ images.float() @ across.unsqueeze(1).transpose(2, 3)
    return resized.clamp(0, 255).round().to(torch.uint8)


def _resampling(start: Tensor, length: Tensor, inputs: int, outputs: int) -> Tensor:
    """Return the weight of each input pixel from `start` on for each output pixel: float32 [B, outputs, inputs]."""
    device = start.device
    scale = (length / outputs)[:, None, None]
    centres = start[:, None, None] + (torch.arange(outputs, device=device)[:, None] + 0.5) * scale
    pixels = torch.arange(inputs, device=device)
    weights = (1 - (pixels + 0.5 - centres).abs() / scale.clamp_min(1)).clamp_min(0)
    inside = (pixels >= start[:, None]) & (pixels < (start + length)[:, None])
    weights = weights * inside[:, None, :]
    return weights / weights.sum(dim=2, keepdim=True)
