"""Turn an upload into the uint8 picture that a model sees, or into the photo to draw on. No torch.

    bytes -> decoded -> crop box: RGB, resized -> turned upright -> uint8 array

The pixels equal those of torchvision's `Resize` and `CenterCrop` on the upright RGB picture, which
timm's and transformers' PIL transforms use too. Only the order of the work differs: pixels outside
the crop box are never resized, and the picture is turned when it is small.
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

# Up to this many pixels of a side, Pillow resizes the whole picture. Pillow resizes a part in
# 32-bit floats, which may change a value by one level in each pass.
_MAX_WHOLE_SIDE = 4096

# Pixels on each side that the widest filter (Lanczos) reads for an enlarged pixel, rounded up.
_REACH = 4

# A scaled decode leaves at least this many times the pixels of the resized picture, along each
# axis.
_MIN_DECODED_FACTOR = 2

# Filters whose weights jump at pixel borders: `nearest` uses single pixels, `box` whole pixels.
# After a scaled decode they use other pixels, so a value may change by 80 levels.
_HARD_FILTERS = ("nearest", "box")

# Default limit of a photo's longer side, in pixels.
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
    """The rectangle of the upright original that the model's input and every map cover.

    The unit is pixels of the original, with fractions; (`x`, `y`) is the upper left corner. The
    rectangle is inside the photo.
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
        region: the part of the upright original that `pixels` show.
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
    """Return the pixels of `model_input`, for callers that draw no maps."""
    return model_input(data, config, max_pixels=max_pixels, scaled_decode=scaled_decode).pixels


def model_input(
    data: bytes | bytearray | memoryview,
    config: PreprocessConfig,
    *,
    max_pixels: int = DEFAULT_MAX_PIXELS,
    scaled_decode: bool = True,
) -> ModelInput:
    """Return the picture in an uploaded file as the model sees it, and its region of the photo.

    Thread-safe; Pillow releases the interpreter's lock while it decodes and resizes.

    Args:
        data: a whole file: JPEG (also MPO), PNG, WebP, GIF, BMP, TIFF, AVIF, and HEIC if
            pillow-heif is installed. Only the first picture of a file is used. Alpha and ICC
            profiles are ignored.
        config: the checkpoint's preprocessing; a single `mean` makes a greyscale picture.
        max_pixels: most pixels of the stored picture.
        scaled_decode: decode large JPEGs at the smallest of 1/8, 1/4 and 1/2 that leaves at least
            twice the pixels of the resized, uncropped picture along both axes. The resize then
            still shrinks by 2 or more, so the pixels are close to those of a full decode, but not
            equal. No effect if the filter is `nearest` or `box`.

    Returns:
        Pixels of `config.size`, C-contiguous and writable, with `len(config.mean)` channels, 3 or
        1; and their region.

    Raises:
        ImageError: see `model.images.decode.decode`; or the pixels cannot be converted.
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
    """Return the photo in an uploaded file, upright and not larger than `size`, and its region.

    Memory is bounded as in `model_input`, plus the result.

    Args:
        region: in pixels of the upright original.
        size: limit of the longer side in pixels; None: 1024.
        max_pixels: see `model_input`.
        scaled_decode: decode large JPEGs at the smallest of 1/8, 1/4 and 1/2 that is not below the
            result's size.

    Returns:
        uint8 [H, W, 3] RGB, and the region in pixels of the result.

    Raises:
        ImageError: as for `model_input`.
    """
    longer = _MAX_PHOTO_SIZE if size is None else size

    def shrunk(width: int, height: int) -> tuple[int, int]:
        factor = min(1.0, longer / max(width, height))
        return max(1, round(width * factor)), max(1, round(height * factor))

    decoded = decode(data, max_pixels=max_pixels, min_size=shrunk if scaled_decode else None)
    try:
        convert = converter(decoded.image, "RGB")
        whole = decoded.image if convert is None else convert(decoded.image)
        box = (0.0, 0.0, decoded.size[0] / decoded.scale, decoded.size[1] / decoded.scale)
        small = whole.resize(shrunk(*decoded.size), Image.Resampling.BICUBIC, box).convert("RGB")
    except DECODE_ERRORS as error:
        raise InvalidImage(f"the picture's pixels cannot be converted: {error}") from error
    width, height = decoded.size
    if decoded.orientation >= 5:
        width, height = height, width
    if decoded.orientation in TRANSPOSE:
        small = small.transpose(TRANSPOSE[decoded.orientation])
    across = small.width / width
    down = small.height / height
    region_of_result = Region(
        region.x * across, region.y * down, region.width * across, region.height * down
    )
    return np.asarray(small), region_of_result


def min_decoded_size(config: PreprocessConfig) -> MinSize | None:
    """Return the function from an upright size to the smallest size to decode a JPEG at.

    Returns:
        The function; None for a filter that needs a full decode.
    """
    if config.interpolation in _HARD_FILTERS:
        return None

    def min_size(width: int, height: int) -> tuple[int, int]:
        new_width, new_height = resized_size(width, height, config)
        return _MIN_DECODED_FACTOR * new_width, _MIN_DECODED_FACTOR * new_height

    return min_size


def resized_size(width: int, height: int, config: PreprocessConfig) -> tuple[int, int]:
    """Return the upright picture's (width, height) in pixels after the resize, before the crop.

    A square `shortest_edge` rounds like torchvision's `Resize(int)`, any other like timm's
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
    """Return the resized centre of the upright picture, and its region."""
    swapped = decoded.orientation >= 5
    stored = (decoded.size[0] / decoded.scale, decoded.size[1] / decoded.scale)
    mirrored = (decoded.orientation in _MIRRORED_COLUMNS, decoded.orientation in _MIRRORED_ROWS)
    size = decoded.size[::-1] if swapped else decoded.size
    decoded_size = decoded.image.size[::-1] if swapped else decoded.image.size
    resized = resized_size(*size, config)

    def upright_axis(axis: int, count: int) -> Axis:
        stored_axis = 1 - axis if swapped else axis
        length = stored[stored_axis]
        is_mirrored = mirrored[stored_axis]
        low = decoded_size[axis] - length if is_mirrored else 0.0
        margin = resized[axis] - count
        # torchvision's center_crop rounds a half to even, transformers' rounds it down.
        first = margin // 2 if config.crop_rounding == "down" else round(margin / 2.0)
        return Axis(low, low + length, resized[axis], first, count, is_mirrored)

    across = upright_axis(0, config.size[1])
    down = upright_axis(1, config.size[0])
    resample = Image.Resampling[config.interpolation.upper()]
    convert = converter(decoded.image, "RGB" if len(config.mean) == 3 else "L")
    # The order of the passes in a resize of the whole upright picture.
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
    if small.shape[2] != len(config.mean):  # a grey picture for a model of RGB
        small = np.repeat(small, len(config.mean), axis=2)
    return np.require(small, requirements=["C", "W"]), region


def _resample_by_pillow(
    decoded: DecodedImage,
    across: Axis,
    down: Axis,
    resample: Image.Resampling,
    convert: Converter | None,
    *,
    rows_first: bool,
) -> NDArray[np.uint8]:
    """Return a part of the picture, turned, converted and resized by Pillow.

    Args:
        across, down: along the width and the height of the upright picture.
        rows_first: order of Pillow's passes for the whole picture. Clipped overshoots depend on it.

    Returns:
        uint8 [rows, columns, 1 or 3].
    """
    upright = decoded.image if convert is None else convert(decoded.image)
    if decoded.orientation in TRANSPOSE:
        upright = upright.transpose(TRANSPOSE[decoded.orientation])
    if max(across.size, down.size) <= _MAX_WHOLE_SIDE:
        box = (across.low, down.low, across.high, down.high)
        whole = upright.resize((across.size, down.size), resample, box)
        right = across.first + across.length
        bottom = down.first + down.length
        part = whole.crop((across.first, down.first, right, bottom))
    else:
        left, right = _read_part(across, upright.width)
        top, bottom = _read_part(down, upright.height)
        part = upright.crop((left, top, right, bottom))
        passes = [(0, across, left), (1, down, top)]
        if rows_first:
            passes.reverse()
        for dimension, axis, start in passes:
            part = _resized_along(part, dimension, axis, start, resample)
    return np.atleast_3d(np.asarray(part))


def _part_of(axis: Axis) -> tuple[float, float]:
    """Return the start and end in the source of the pixels to compute, in source pixels."""
    step = (axis.high - axis.low) / axis.size
    return axis.low + axis.first * step, axis.low + (axis.first + axis.length) * step


def _read_part(axis: Axis, size: int) -> tuple[int, int]:
    """Return the range of source pixels (first, last + 1) that an axis's part depends on.

    Args:
        size: number of source pixels.
    """
    low, high = _part_of(axis)
    reach = _REACH * max(1.0, (axis.high - axis.low) / axis.size)
    return max(0, math.floor(low - reach)), min(size, math.ceil(high + reach))


def _resized_along(
    image: Image.Image, dimension: int, axis: Axis, start: int, resample: Image.Resampling
) -> Image.Image:
    """Return the part of an axis, resized along this axis only.

    Args:
        image: begins at source pixel `start` of the axis.
        dimension: 0 for the width, 1 for the height.
    """
    low, high = (end - start for end in _part_of(axis))
    # Rounding may move the end slightly outside, which Pillow refuses.
    high = min(high, image.size[dimension])
    if dimension == 0:
        return image.resize((axis.length, image.height), resample, (low, 0.0, high, image.height))
    return image.resize((image.width, axis.length), resample, (0.0, low, image.width, high))
