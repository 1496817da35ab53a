"""A random rectangle for each image of a batch, and crops that are resized from it.

All is drawn on the batch's device without waiting for it.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

_ATTEMPTS: Final = 10
"""How often a rectangle that does not fit is drawn again, as in torchvision and timm."""

_CROP_RATIO: Final = (3 / 4, 4 / 3)
"""Least and largest width / height of a crop."""


class Boxes(NamedTuple):
    """First row and column, height and width of rectangles in pixels, each int64 [B]; all zero where none fitted."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor

    def mask(self, size: tuple[int, int]) -> Tensor:
        """Return bool [B, 1, rows, columns] for images of `size`, true inside the rectangle."""
        rows = torch.arange(size[0], device=self.top.device)
        columns = torch.arange(size[1], device=self.top.device)
        inside_rows = (rows >= self.top[:, None]) & (rows < (self.top + self.height)[:, None])
        inside_columns = (columns >= self.left[:, None]) & (columns < (self.left + self.width)[:, None])
        return (inside_rows[:, :, None] & inside_columns[:, None, :]).unsqueeze(1)


def random_boxes(
    count: int,
    size: tuple[int, int],
    share: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> Boxes:
    """Draw `count` rectangles within images of `size`, evenly distributed over the places where they fit.

    Args:
        size: (rows, columns) of the images.
        share: least and largest area as a share of the image's, drawn evenly.
        ratio: least and largest width / height, drawn evenly on a logarithmic scale.
        generator: the rectangles are made on its device.
    """
    device = generator.device

    def evenly(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator, device=device)

    area = evenly(*share, count, _ATTEMPTS) * (size[0] * size[1])
    aspect = evenly(math.log(ratio[0]), math.log(ratio[1]), count, _ATTEMPTS).exp()
    height, width = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (height > 0) & (height <= size[0]) & (width > 0) & (width <= size[1])
    first = fits.int().argmax(dim=1, keepdim=True)
    fitted = fits.any(dim=1)
    height = height.gather(1, first).squeeze(1) * fitted
    width = width.gather(1, first).squeeze(1) * fitted

    def place(room: Tensor) -> Tensor:
        drawn = (evenly(0, 1, count) * (room + 1)).long()
        return torch.minimum(drawn, room) * fitted  # rounding may have reached room + 1

    return Boxes(place(size[0] - height), place(size[1] - width), height, width)


def random_resized_crop(
    images: Tensor, size: tuple[int, int], least_share: float, generator: torch.Generator
) -> Tensor:
    """Resize a random part of each image to `size`, antialiased.

    Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 6; torchvision's `RandomResizedCrop`.

    Where no part of an allowed shape was drawn (very long images), it is the largest part of allowed shape in the
    middle, as in torchvision.

    Args:
        size: (rows, columns) of the result.
        least_share: of an image's area that its part covers, above 0 and up to 1.
    """
    rows, columns = images.shape[2:]
    drawn = random_boxes(len(images), (rows, columns), (least_share, 1.0), _CROP_RATIO, generator)
    height = min(rows, round(columns / _CROP_RATIO[0]))
    width = min(columns, round(rows * _CROP_RATIO[1]))
    middle = ((rows - height) // 2, (columns - width) // 2, height, width)
    fitted = drawn.height > 0
    boxes = Boxes(*(torch.where(fitted, edge, default) for edge, default in zip(drawn, middle, strict=True)))
    return resize_boxes(images, boxes, size)


def resize_boxes(images: Tensor, boxes: Boxes, size: tuple[int, int]) -> Tensor:
    """Cut a box, none empty, out of each image and resize it with PIL's antialiased bilinear filter.

    The filter is separable, so that each axis is a matrix product for the whole batch. `size` is the (rows, columns) of
    the result.
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
