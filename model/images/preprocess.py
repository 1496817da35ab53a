"""The bytes of an upload become the uint8 picture that a model sees, or the photo that is drawn on,
without torch.

    bytes -> decoded -> the part that survives the centre crop: RGB, resized -> turned upright ->
    uint8 array

The pixels are those of torchvision's `Resize` and `CenterCrop` on the upright RGB picture, which
timm's and transformers' PIL transforms use too. Only the order of the work differs: what the crop
throws away is never resized, and the picture is turned when it is small.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.config import PreprocessConfig
from model.errors import InvalidImage
from model.images.decode import (
    DECODE_ERRORS,
    DEFAULT_MAX_PIXELS,
    Converter,
    DecodedImage,
    MinSize,
    converter,
    decode,
)
from model.images.resample import Axis, passes_rows_first, resample_part

# Up to this many pixels of a side, Pillow resizes a picture whole: it takes a part in 32-bit
# floats, which may move a value by one level in each pass.
_MAX_WHOLE_SIDE = 4096

# Pixels that the widest filter (Lanczos) reads beside an enlarged pixel, rounded up.
_REACH = 4

# How many times as many pixels as the resized picture a scaled decode leaves, along each axis.
_MIN_DECODED_FACTOR = 2

# Longer side of a photo in pixels, at most, where no size is given.
_MAX_PHOTO_SIZE = 1024

# Transpositions that turn a picture of each Exif orientation upright (as
# `PIL.ImageOps.exif_transpose`).
TRANSPOSE = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Exif orientations of pictures that are stored from right to left, and from bottom to top.
_MIRRORED_COLUMNS = (2, 3, 7, 8)
_MIRRORED_ROWS = (3, 4, 6, 7)


class Region(NamedTuple):
    """The rectangle of the upright original that the model's input, and so every map, covers.

    In pixels of the original, with fractions; (`x`, `y`) is its upper left corner. It lies within
    the photo.
    """

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A picture as the model sees it.

    Attributes:
        pixels: uint8 [rows, columns, channels] of the model's input size.
        region: the part of the upright original that they show.
    """

    pixels: NDArray[np.uint8]
    region: Region


def preprocess(
    data: bytes | bytearray | memoryview,
    config: PreprocessConfig,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    scaled_decode: bool = True,
) -> NDArray[np.uint8]:
    """Return the pixels of `model_input`, for callers who draw no maps."""
    return model_input(data, config, max_pixels=max_pixels, scaled_decode=scaled_decode).pixels


def model_input(
    data: bytes | bytearray | memoryview,
    config: PreprocessConfig,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    scaled_decode: bool = True,
) -> ModelInput:
    """Return the picture in an uploaded file as the model sees it, and which part of the photo that
    is.

    It is thread-safe; Pillow releases the interpreter's lock while it decodes and resizes.

    Args:
        data: a whole file: JPEG (also MPO), PNG, WebP, GIF, BMP, TIFF, AVIF, and HEIC where
            pillow-heif is installed. Of several pictures the first counts. Alpha and ICC profiles
            are ignored.
        config: the checkpoint's preprocessing; one `mean` makes a greyscale picture.
        max_pixels: how many pixels the picture may have as stored.
        scaled_decode: decode large JPEGs at the smallest of 1/8, 1/4 and 1/2 that leaves at least
            twice the pixels, along both axes, of the size that the picture is resized to, before
            the crop. What follows then still shrinks it by 2 or more, so that the pixels are close
            to, but not those of, a full decode.

    Returns:
        Pixels of `config.size`, C-contiguous and writable, with `len(config.mean)` channels, 3 or
        1; and their region.

    Raises:
        ImageError: see `model.images.decode.decode`; or its pixels cannot be converted.
        ValueError: `config` has neither 1 nor 3 channels.
    """
    channels = len(config.mean)
    if channels not in (1, 3):
        raise ValueError(f"mean has {channels} channels: pictures have 3 (RGB) or 1 (greyscale)")

    decoded = decode(
        bytes(data) if isinstance(data, memoryview) else data,
        max_pixels=max_pixels,
        min_size=min_decoded_size(config) if scaled_decode else None,
    )
    try:
        pixels, region = _resize_and_crop(decoded, config)
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the picture's pixels cannot be converted: {error}") from error
    return ModelInput(pixels, region)


def upright_photo(
    data: bytes | bytearray,
    region: Region,
    size: int | None = None,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    scaled_decode: bool = True,
) -> tuple[NDArray[np.uint8], Region]:
    """Return the photo in an uploaded file, shrunk where it is larger than `size` and turned
    upright.

    It needs the memory that `model_input` needs, and that of the result.

    Args:
        region: in pixels of the upright original.
        size: the longer side in pixels, at most; None: 1024.
        max_pixels: see `model_input`.
        scaled_decode: decode large JPEGs at the smallest of 1/8, 1/4 and 1/2 that is not below the
        result's size.

    Returns:
        uint8 [H, W, 3] RGB, and where in it the region lies.

    Raises:
        ImageError: as `model_input`.
    """
    longer = _MAX_PHOTO_SIZE if size is None else size

    def shrunk(width: int, height: int) -> tuple[int, int]:
        factor = min(1.0, longer / max(width, height))
        return max(1, round(width * factor)), max(1, round(height * factor))

    decoded = decode(data, max_pixels=max_pixels, min_size=shrunk if scaled_decode else None)
    try:
        convert, scale = converter(decoded.image, "RGB"), decoded.scale
        whole = decoded.image if convert is None else convert(decoded.image)
        stored = (0.0, 0.0, decoded.size[0] / scale, decoded.size[1] / scale)
        small = whole.resize(shrunk(*decoded.size), Image.Resampling.BICUBIC, stored).convert("RGB")
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the picture's pixels cannot be converted: {error}") from error
    width, height = decoded.size
    if decoded.orientation >= 5:
        width, height = height, width
    if decoded.orientation in TRANSPOSE:
        small = small.transpose(TRANSPOSE[decoded.orientation])
    across, down = small.width / width, small.height / height
    return np.asarray(small), Region(
        region.x * across, region.y * down, region.width * across, region.height * down
    )


def min_decoded_size(config: PreprocessConfig) -> MinSize:
    """Return the function from an upright size to the smallest that `preprocess` lets a JPEG be
    decoded at.
    """

    def min_size(width: int, height: int) -> tuple[int, int]:
        new_width, new_height = resized_size(width, height, config)
        return _MIN_DECODED_FACTOR * new_width, _MIN_DECODED_FACTOR * new_height

    return min_size


def resized_size(width: int, height: int, config: PreprocessConfig) -> tuple[int, int]:
    """Return (width, height) of an upright picture after the resize and before the centre crop, in
    pixels.

    A square `shortest_edge` rounds as torchvision's `Resize(int)`, any other as timm's
    `ResizeKeepRatio`.
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


def _resize_and_crop(
    decoded: DecodedImage, config: PreprocessConfig
) -> tuple[NDArray[np.uint8], Region]:
    """Return the centre of the upright picture, resized; and the region that is."""
    swapped = decoded.orientation >= 5
    stored = (decoded.size[0] / decoded.scale, decoded.size[1] / decoded.scale)
    mirrored = decoded.orientation in _MIRRORED_COLUMNS, decoded.orientation in _MIRRORED_ROWS
    size, decoded_size = (
        each[::-1] if swapped else each for each in (decoded.size, decoded.image.size)
    )
    resized = resized_size(*size, config)

    def upright_axis(axis: int, count: int) -> Axis:
        place = 1 - axis if swapped else axis
        low = decoded_size[axis] - stored[place] if mirrored[place] else 0.0
        margin = resized[axis] - count
        # A half goes to the even neighbour, as in torchvision's center_crop, or down, as in
        # transformers'.
        first = margin // 2 if config.crop_rounding == "down" else round(margin / 2.0)
        return Axis(low, low + stored[place], resized[axis], first, count, mirrored[place])

    across, down = upright_axis(0, config.size[1]), upright_axis(1, config.size[0])
    resample = Image.Resampling[config.interpolation.upper()]
    convert = converter(decoded.image, "RGB" if len(config.mean) == 3 else "L")
    # The order that the passes would have in a resize of the whole upright picture.
    rows_first = passes_rows_first(decoded_size, resized) != swapped
    axes = (down, across) if swapped else (across, down)
    small = resample_part(decoded.image, *axes, resample, rows_first=rows_first, convert=convert)
    if small is None:
        rows_first = passes_rows_first(decoded_size, resized)
        small = _resample_by_pillow(decoded, across, down, resample, convert, rows_first=rows_first)
    elif swapped:
        small = small.transpose(1, 0, 2)

    region = Region(
        across.first * size[0] / resized[0],
        down.first * size[1] / resized[1],
        across.length * size[0] / resized[0],
        down.length * size[1] / resized[1],
    )
    # A grey picture gets the model's channels.
    pixels = (
        small if small.shape[2] == len(config.mean) else np.repeat(small, len(config.mean), axis=2)
    )
    return np.require(pixels, requirements=["C", "W"]), region


def _resample_by_pillow(
    decoded: DecodedImage,
    across: Axis,
    down: Axis,
    resample: Image.Resampling,
    convert: Converter | None,
    *,
    rows_first: bool,
) -> NDArray[np.uint8]:
    """Return a part of the picture that Pillow turns, converts and resizes, uint8 [rows, columns, 1
    or 3].

    Args:
        across, down: along the width and the height of the upright picture.
        rows_first: the order of the passes that Pillow makes for the whole: what they cut off
        depends on it.
    """
    upright = decoded.image if convert is None else convert(decoded.image)
    if decoded.orientation in TRANSPOSE:
        upright = upright.transpose(TRANSPOSE[decoded.orientation])
    if max(across.size, down.size) <= _MAX_WHOLE_SIDE:
        box = (across.low, down.low, across.high, down.high)
        ends = (across.first + across.length, down.first + down.length)
        part = upright.resize((across.size, down.size), resample, box).crop(
            (across.first, down.first, *ends)
        )
    else:
        (left, right), (top, bottom) = (
            _read_part(axis, upright.size[place]) for place, axis in enumerate((across, down))
        )
        part = upright.crop((left, top, right, bottom))
        passes = [(0, across, left), (1, down, top)]
        for place, axis, start in reversed(passes) if rows_first else passes:
            part = _resized_along(part, place, axis, start, resample)
    return np.atleast_3d(np.asarray(part))


def _part_of(axis: Axis) -> tuple[float, float]:
    """Return where in the source the part of an axis begins and ends, in pixels."""
    step = (axis.high - axis.low) / axis.size
    return axis.low + axis.first * step, axis.low + (axis.first + axis.length) * step


def _read_part(axis: Axis, size: int) -> tuple[int, int]:
    """Return the first of `size` pixels that the part of an axis is made from, and the one behind
    the last.
    """
    low, high = _part_of(axis)
    reach = _REACH * max(1.0, (axis.high - axis.low) / axis.size)
    return max(0, math.floor(low - reach)), min(size, math.ceil(high + reach))


def _resized_along(
    image: Image.Image, place: int, axis: Axis, start: int, resample: Image.Resampling
) -> Image.Image:
    """Return the part of an axis, resized along it alone; `image` begins at pixel `start` of it.

    Args:
        place: 0 for the width, 1 for the height.
    """
    low, high = (end - start for end in _part_of(axis))
    box, size = [0.0, 0.0, *map(float, image.size)], list(image.size)
    # Rounding may leave a corner a hair outside, which Pillow refuses.
    box[place], box[place + 2], size[place] = low, min(high, image.size[place]), axis.length
    return image.resize((size[0], size[1]), resample, (box[0], box[1], box[2], box[3]))
