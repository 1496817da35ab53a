"""A random rectangle for each image of a batch, drawn on the batch's device without waiting for it."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import torch
from torch import Tensor

_ATTEMPTS: Final = 10
"""How often a rectangle that does not fit is drawn again, as in torchvision and timm."""


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
