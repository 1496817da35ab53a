"""Where in the upright photo the model's input lies."""

from __future__ import annotations

from typing import NamedTuple

from model.config import PreprocessConfig


class Region(NamedTuple):
    """The rectangle of the upright original that the model's input, and so every map, covers.

    In pixels of the original, with fractions; (`x`, `y`) is its upper left corner. It lies within the photo, except
    where preprocessing adds a border (`resize` is `border`): there it reaches beyond the photo on both sides.
    """

    x: float
    y: float
    width: float
    height: float


def first_pixel(resized: int, target: int, rounding: str) -> int:
    """Return where along one axis of the resized picture the model's input begins; below zero, in a border.

    Args:
        resized: pixels of the resized picture.
        target: pixels of the model's input.
        rounding: `crop_rounding` of the preprocessing.
    """
    if target > resized:  # an odd pixel of border goes after the picture
        return -((target - resized) // 2)
    # A half goes to the even neighbour, as in torchvision's center_crop, or down, as in transformers'.
    return (resized - target) // 2 if rounding == "down" else round((resized - target) / 2.0)


def seen_region(size: tuple[int, int], resized: tuple[int, int], config: PreprocessConfig) -> Region:
    """Return the region of an upright picture that the model sees.

    Args:
        size: (width, height) of the upright picture in pixels.
        resized: (width, height) after the resize and before the centre crop or the border.
    """
    rows, columns = config.size
    (width, height), (new_width, new_height) = size, resized
    return Region(
        first_pixel(new_width, columns, config.crop_rounding) * width / new_width,
        first_pixel(new_height, rows, config.crop_rounding) * height / new_height,
        columns * width / new_width,
        rows * height / new_height,
    )
