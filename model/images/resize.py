"""Resizing of a part of a picture, of any mode and size, in bounded memory.

The result is what Pillow gives for the whole picture, converted, resized and then cropped: the same pixels, or
one level beside them where a value falls between two (Pillow takes the box in 32-bit floats).

A resize is a pass along each axis. Two calls keep the order of the passes in our hands, and the first can take the
picture in strips.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from PIL import Image

from model.images.colour import Converter

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of the picture, fractions allowed."""

SUPPORT = {
    Image.Resampling.NEAREST: 0.5,
    Image.Resampling.BOX: 0.5,
    Image.Resampling.BILINEAR: 1.0,
    Image.Resampling.HAMMING: 1.0,
    Image.Resampling.BICUBIC: 2.0,
    Image.Resampling.LANCZOS: 3.0,
}
"""Radius of each filter, in output pixels when it shrinks (Pillow's libImaging/Resample.c)."""

_STRIP_PIXELS = 4_000_000
"""Pixels that are cut out and converted at once: bounds what that adds to a picture's memory."""

MAX_INTERMEDIATE_PIXELS = 16_000_000
"""Beyond this many pixels between the two passes, the order that leaves fewer is taken."""

_MAX_PRECISE_SIDE = 32_768
"""Up to this many pixels a box in 32-bit floats is good to 1/512 pixel. Longer pictures are cut first, which makes
its numbers small."""


def passes_rows_first(source: tuple[int, int], target: tuple[int, int]) -> bool:
    """Return whether Pillow resizes `source` (width, height) to `target` vertically first, then horizontally.

    Each pass rounds to uint8 and cuts off what overshoots, so that the order shows: by a few levels where
    neighbouring pixels differ most.
    """
    (width, height), (new_width, new_height) = source, target
    if new_height >= height:
        return False
    if _ORDER_BY_SHRINKAGE:
        return height - new_height > 2 * (width - new_width)
    return height > 100 * width


def _order_by_shrinkage() -> bool:
    """Return whether this Pillow orders the passes by how much each removes (13) or only by the shape (before)."""
    image = Image.frombytes("L", (10, 30), bytes(255 * (pixel * pixel // 7 % 2) for pixel in range(300)))
    bicubic = Image.Resampling.BICUBIC
    rows_first = image.resize((10, 10), bicubic).resize((9, 10), bicubic)
    columns_first = image.resize((9, 30), bicubic).resize((9, 10), bicubic)
    assert rows_first.tobytes() != columns_first.tobytes()
    return image.resize((9, 10), bicubic).tobytes() == rows_first.tobytes()


_ORDER_BY_SHRINKAGE = _order_by_shrinkage()


def resize(
    image: Image.Image,
    size: tuple[int, int],
    box: Box,
    resample: Image.Resampling,
    *,
    convert: Converter | None = None,
    rows_first: bool | None = None,
) -> Image.Image:
    """Return a part of a loaded picture, converted and resized.

    Args:
        size: (width, height) of the result in pixels.
        convert: applied to pieces of the picture before they are resized; None: nothing to convert.
        rows_first: resize vertically first; None: whichever order is quicker. Overruled where the picture between
            the passes would be huge.
    """
    pillow_rows_first = passes_rows_first(image.size, size)
    if rows_first is None:
        rows_first = pillow_rows_first
    # Between the passes stands a picture with a side of the box and a side of the result.
    if max(size[0] * (box[3] - box[1]), size[1] * (box[2] - box[0])) > MAX_INTERMEDIATE_PIXELS:
        rows_first = size[1] * (box[2] - box[0]) < size[0] * (box[3] - box[1])
    if convert is None and rows_first == pillow_rows_first and max(image.size) <= _MAX_PRECISE_SIDE:
        return image.resize(size, resample, _within(box, image.size))

    margin = [_margin(box[axis + 2] - box[axis], size[axis], resample) for axis in (0, 1)]
    left, top = (max(0, math.floor(box[axis]) - margin[axis]) for axis in (0, 1))
    right, bottom = (min(image.size[axis], math.ceil(box[axis + 2]) + margin[axis]) for axis in (0, 1))
    box = _within((box[0] - left, box[1] - top, box[2] - left, box[3] - top), (right - left, bottom - top))

    between: Image.Image | None = None
    for start, strip in strips(image, (left, top, right, bottom), convert, rows_first):
        if rows_first:
            small = strip.resize((strip.width, size[1]), resample, (0, box[1], strip.width, box[3]))
            between = between or Image.new(small.mode, (right - left, size[1]))
            between.paste(small, (start, 0))
        else:
            small = strip.resize((size[0], strip.height), resample, (box[0], 0, box[2], strip.height))
            between = between or Image.new(small.mode, (size[0], bottom - top))
            between.paste(small, (0, start))
    assert between is not None
    if rows_first:
        return between.resize(size, resample, (box[0], 0, box[2], size[1]))
    return between.resize(size, resample, (0, box[1], size[0], box[3]))


def strips(
    image: Image.Image, part: tuple[int, int, int, int], convert: Converter | None, upright: bool
) -> Iterator[tuple[int, Image.Image]]:
    """Yield a part of a picture in converted strips, each with where it begins in the part.

    The first pass of a resize takes every row (or column) by itself, so that strips of them can go through it in turn.

    Args:
        part: (left, top, right, bottom).
        upright: the strips are beside each other; else below each other.
    """
    left, top, right, bottom = part
    if upright:
        step = max(1, _STRIP_PIXELS // (bottom - top))
        for start in range(left, right, step):
            yield start - left, _piece(image, (start, top, min(start + step, right), bottom), convert)
    else:
        step = max(1, _STRIP_PIXELS // (right - left))
        for start in range(top, bottom, step):
            yield start - top, _piece(image, (left, start, right, min(start + step, bottom)), convert)


def _piece(image: Image.Image, box: tuple[int, int, int, int], convert: Converter | None) -> Image.Image:
    piece = image if box == (0, 0, *image.size) else image.crop(box)
    return piece if convert is None else convert(piece)


def _margin(source: float, target: int, resample: Image.Resampling) -> int:
    """Return how many pixels beyond a part of the picture a filter looks at."""
    return math.ceil(SUPPORT[resample] * max(1.0, source / target)) + 1


def _within(box: Box, size: tuple[int, int]) -> Box:
    """Return the box within the picture: rounding may leave a corner a hair outside, which Pillow refuses."""
    return max(0.0, box[0]), max(0.0, box[1]), min(float(size[0]), box[2]), min(float(size[1]), box[3])
