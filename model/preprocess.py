"""From the bytes of an upload to the uint8 picture that a model sees. PIL and numpy, never torch.

bytes -> decoded -> resized and centre-cropped -> upright, as the checkpoint's `PreprocessConfig` says. The
pixels are those that torchvision's `Resize` and `CenterCrop` give for the upright RGB picture (timm and
transformers use the same), but only the part that survives the crop is resized, colours are converted strip by
strip, and the picture is turned when it is small.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.config import PreprocessConfig
from model.errors import InvalidImage
from model.image_colour import Converter, converter
from model.image_decode import DECODE_ERRORS, DEFAULT_MAX_PIXELS, Picture, decode

__all__ = ["DEFAULT_MAX_PIXELS", "preprocess"]

Box = tuple[float, float, float, float]
"""(left, top, right, bottom) in pixels of the picture, fractions allowed."""

_RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

_SUPPORT = {
    Image.Resampling.NEAREST: 0.5,
    Image.Resampling.BOX: 0.5,
    Image.Resampling.BILINEAR: 1.0,
    Image.Resampling.HAMMING: 1.0,
    Image.Resampling.BICUBIC: 2.0,
    Image.Resampling.LANCZOS: 3.0,
}
"""Radius of each filter in output pixels when shrinking (Pillow's libImaging/Resample.c)."""

_TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What turns a picture of this Exif orientation upright (as `PIL.ImageOps.exif_transpose`)."""

_STRIP_PIXELS = 8_000_000
"""Pixels converted at once: bounds what a conversion adds to a picture's memory."""

_INTERMEDIATE_PIXELS = 16_000_000
"""A picture between the two passes of a resize may have this many; beyond, the passes are swapped if it helps."""


def preprocess(
    data: bytes | bytearray | memoryview,
    config: PreprocessConfig,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    scaled_decode: bool = True,
) -> NDArray[np.uint8]:
    """Decode one upload into the picture that the model sees.

    Thread-safe; Pillow releases the GIL while it decodes and resizes.

    Args:
        data: a whole file: JPEG (also MPO), PNG, WebP, GIF, BMP, TIFF, AVIF, and HEIC where pillow-heif is
            installed. Of several pictures the first counts. Alpha and ICC profiles are ignored.
        config: the checkpoint's preprocessing; one `mean` makes a greyscale picture.
        max_pixels: how many pixels the picture may have.
        scaled_decode: decode large JPEGs at 1/2, 1/4 or 1/8, never below twice the size they are resized to.

    Returns:
        uint8 [rows, columns, channels] of `config.size`, C-contiguous and writable; channels is
        `len(config.mean)`, 3 or 1.

    Raises:
        UnsupportedImageFormat: not the magic of an allowed format.
        ImageTooLarge: more pixels than `max_pixels`; raised before they are allocated.
        InvalidImage: empty, truncated or corrupt.
        ValueError: `config` has neither 1 nor 3 channels.
    """
    channels = len(config.mean)
    if channels not in (1, 3):
        raise ValueError(f"mean has {channels} channels: pictures have 3 (RGB) or 1 (greyscale)")

    def smallest(width: int, height: int) -> tuple[int, int]:
        new_width, new_height = resized_size(width, height, config)
        return 2 * new_width, 2 * new_height

    picture = decode(data, max_pixels=max_pixels, smallest=smallest if scaled_decode else None)
    try:
        small = _fit(picture, config, "RGB" if channels == 3 else "L")
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the picture's pixels cannot be converted: {error}") from error
    pixels = np.asarray(small)
    if pixels.ndim == 2:
        return np.repeat(pixels[:, :, np.newaxis], channels, axis=2)
    return pixels.copy()  # Pillow's view is read-only


def resized_size(width: int, height: int, config: PreprocessConfig) -> tuple[int, int]:
    """(width, height) of an upright picture after the resize, before the centre crop, in pixels.

    A square `shortest_edge` rounds as torchvision's `Resize(int)`, any other as timm's `ResizeKeepRatio`.
    """
    rows, columns = config.resize_size
    if config.resize == "squash":
        return columns, rows
    if rows == columns:
        if width <= height:
            return columns, int(rows * height / width)
        return int(columns * width / height), rows
    ratio = min(height / rows, width / columns)
    return round(width / ratio), round(height / ratio)


def crop_box(width: int, height: int, config: PreprocessConfig) -> Box:
    """The part that the model sees of an upright picture of `width` x `height`, in that picture's pixels."""
    new_width, new_height = resized_size(width, height, config)
    rows, columns = config.size
    # As torchvision's center_crop: a half goes to the even neighbour.
    left, top = round((new_width - columns) / 2.0), round((new_height - rows) / 2.0)
    return (
        left * width / new_width,
        top * height / new_height,
        (left + columns) * width / new_width,
        (top + rows) * height / new_height,
    )


def _fit(picture: Picture, config: PreprocessConfig, mode: Literal["RGB", "L"]) -> Image.Image:
    """Resize and crop a picture as it is stored, then turn the small result upright."""
    image, orientation, (width, height) = picture.image, picture.orientation, picture.size
    swapped = orientation >= 5
    rows, columns = config.size
    box = _as_stored(crop_box(*((height, width) if swapped else (width, height)), config), picture)
    box = (box[0] / picture.scale, box[1] / picture.scale, box[2] / picture.scale, box[3] / picture.scale)
    small = _resize(
        image,
        converter(image, mode),
        (rows, columns) if swapped else (columns, rows),
        box,
        _RESAMPLING[config.interpolation],
        # The passes keep the order that they would have on the upright picture: each rounds to uint8.
        rows_first=swapped,
    )
    return small.transpose(_TRANSPOSE[orientation]) if orientation in _TRANSPOSE else small


def _as_stored(box: Box, picture: Picture) -> Box:
    """A box of the upright picture as a box of the picture as it is stored."""
    width, height = picture.size
    left, top, right, bottom = box
    if picture.orientation >= 5:
        left, top, right, bottom = top, left, bottom, right
    if picture.orientation in (2, 3, 7, 8):
        left, right = width - right, width - left
    if picture.orientation in (3, 4, 6, 7):
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def _resize(
    image: Image.Image,
    convert: Converter | None,
    size: tuple[int, int],
    box: Box,
    resample: Image.Resampling,
    *,
    rows_first: bool,
) -> Image.Image:
    """Convert and resize `box` of `image` to `size` (width, height), strip by strip.

    Args:
        rows_first: resize vertically, then horizontally; else the other way round, as Pillow does.
    """
    between = size[0] * (box[3] - box[1]), size[1] * (box[2] - box[0])
    if max(between) > _INTERMEDIATE_PIXELS:
        rows_first = between[1] < between[0]

    # Strips lie across the axis that is resized last, so that the first pass of a strip is complete.
    axis = 0 if rows_first else 1
    scale = (box[2] - box[0]) / size[0], (box[3] - box[1]) / size[1]
    margin = [math.ceil(_SUPPORT[resample] * max(1.0, s)) + 1 for s in scale]
    other = 1 - axis
    low = max(0, math.floor(box[other]) - margin[other])
    high = min(image.size[other], math.ceil(box[2 + other]) + margin[other])

    step = size[axis]
    if convert is not None:
        step = max(1, int(_STRIP_PIXELS / (high - low) / scale[axis]) - 2 * math.ceil(margin[axis] / scale[axis]))
    result: Image.Image | None = None
    for start in range(0, size[axis], step):
        stop = min(start + step, size[axis])
        first, last = box[axis] + start * scale[axis], box[axis] + stop * scale[axis]
        region = [0, 0, 0, 0]
        region[other], region[2 + other] = low, high
        region[axis] = max(0, math.floor(first) - margin[axis])
        region[2 + axis] = min(image.size[axis], math.ceil(last) + margin[axis])
        whole = region == [0, 0, *image.size]
        piece = image if whole else image.crop((region[0], region[1], region[2], region[3]))
        if convert is not None:
            piece = convert(piece)
        part = list(box)
        part[axis], part[2 + axis] = first, last
        target = list(size)
        target[axis] = stop - start
        small = _two_passes(
            piece,
            (target[0], target[1]),
            (part[0] - region[0], part[1] - region[1], part[2] - region[0], part[3] - region[1]),
            resample,
            rows_first=rows_first,
        )
        if target == list(size):
            return small
        if result is None:
            result = Image.new(small.mode, size)
        result.paste(small, (start, 0) if axis == 0 else (0, start))
    assert result is not None
    return result


def _two_passes(
    image: Image.Image, size: tuple[int, int], box: Box, resample: Image.Resampling, *, rows_first: bool
) -> Image.Image:
    # Rounding may leave a corner a hair outside the picture, which Pillow refuses.
    left, top = max(0.0, box[0]), max(0.0, box[1])
    right, bottom = min(float(image.width), box[2]), min(float(image.height), box[3])
    if not rows_first:
        return image.resize(size, resample, (left, top, right, bottom))
    tall = image.resize((image.width, size[1]), resample, (0, top, image.width, bottom))
    return tall.resize(size, resample, (left, 0, right, size[1]))
