"""Pillow's resampling in a compiled kernel: the same levels, several times as fast.

Pillow weighs pixels with integers of 22 binary places, sums in 32-bit integers, and rounds to uint8
after each of two passes (its libImaging/Resample.c). So does the kernel (`resample.c`), eight sums
at once; its weights are made here. It runs on x86-64 with AVX2, if there was a C compiler when the
package was installed. Elsewhere, and for what `resample_part` returns None for, Pillow resizes.
"""

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.images.decode import Converter

# Pixels that are cut out and converted at once: bounds what that adds to a picture's memory.
_STRIP_PIXELS = 4_000_000

# Beyond this many pixels between the two passes, the order that leaves fewer is taken.
_MAX_INTERMEDIATE_PIXELS = 16_000_000

# Weights of a pass, at most: those of a bicubic resize of 24,000 pixels. Pillow makes larger
# passes.
_MAX_WEIGHTS = 98_304

Floats = NDArray[np.float64]


class Axis(NamedTuple):
    """What is asked along one axis of a picture.

    Attributes:
        low, high: the part of the picture that is resized, in pixels, counted along the upright
        picture.
        size: pixels that the part becomes.
        first, length: the pixels of those that are computed.
        mirrored: the upright picture runs the other way than the stored one.
    """

    low: float
    high: float
    size: int
    first: int
    length: int
    mirrored: bool = False


class _Pass(NamedTuple):
    """For each pixel of the result the first that it is made from, int32 [N], and the weights,
    int32 [N, taps].
    """

    first: NDArray[np.int32]
    weights: NDArray[np.int32]

    @property
    def span(self) -> tuple[int, int]:
        """The first pixel that is read, and the one behind the last."""
        return int(self.first.min()), int(self.first.max()) + self.weights.shape[1]


class _Pixels(NamedTuple):
    """uint8 pixels of 1, 3 or 4 bytes, in rows that begin `stride` bytes apart; `owner` keeps them
    alive.
    """

    address: int
    stride: int
    bands: int
    owner: object


def passes_rows_first(source: tuple[int, int], target: tuple[int, int]) -> bool:
    """Return whether Pillow (13) resizes `source` (width, height) to `target` vertically first,
    then horizontally.

    Each pass rounds to uint8 and cuts off what overshoots, so that the order shows: by a few levels
    where neighbouring pixels differ most.
    """
    (width, height), (new_width, new_height) = source, target
    return new_height < height and height - new_height > 2 * (width - new_width)


def is_compiled() -> bool:
    """Return whether the kernel resizes here, and not Pillow."""
    return _KERNEL is not None


def resample_part(
    image: Image.Image,
    columns: Axis,
    rows: Axis,
    resample: Image.Resampling,
    *,
    rows_first: bool,
    convert: Converter | None = None,
) -> NDArray[np.uint8] | None:
    """Return a part of what Pillow makes of a picture that is turned, converted and resized whole;
    None: not supported.

    Only what the part needs is computed, in bounded memory. It is thread-safe and releases the
    interpreter's lock.

    Args:
        image: loaded.
        columns, rows: along the width and the height of `image` as it is stored.
        rows_first: resize vertically first. Overruled where the picture between the passes would be
        huge.
        convert: makes L or RGB of any piece of `image`; None: it is one of the two.

    Returns:
        uint8 [rows.length, columns.length, 1 or 3], C-contiguous; along a mirrored axis in the
        upright picture's order.
    """
    across, down = (
        _pass(source, axis, resample)
        for source, axis in zip(image.size, (columns, rows), strict=True)
    )
    if _KERNEL is None or across is None or down is None:
        return None
    (left, right), (top, bottom) = across.span, down.span
    across, down = _Pass(across.first - left, across.weights), _Pass(down.first - top, down.weights)
    between = (bottom - top) * columns.length, (right - left) * rows.length
    if between[rows_first] > _MAX_INTERMEDIATE_PIXELS:
        rows_first = between[True] < between[False]

    shape = (rows.length, right - left) if rows_first else (bottom - top, columns.length)
    middle: NDArray[np.uint8] | None = None
    for start, size, piece in _strips(image, (left, top, right, bottom), convert, rows_first):
        if middle is None:  # a pass along the width keeps three of four bytes a pixel
            middle = np.empty(
                (*shape, piece.bands if rows_first else min(piece.bands, 3)), np.uint8
            )
        if rows_first:
            _apply(piece, size * piece.bands, down, middle[:, start:], vertical=True)
        else:
            _apply(piece, size, across, middle[start:], vertical=False)
    assert middle is not None
    source = _Pixels(middle.ctypes.data, middle.strides[0], middle.shape[2], middle)
    result = np.empty((rows.length, columns.length, min(source.bands, 3)), np.uint8)
    if rows_first:
        _apply(source, rows.length, across, result, vertical=False)
    else:
        _apply(source, source.stride, down, result, vertical=True)
    return result


def _strips(
    image: Image.Image, part: tuple[int, int, int, int], convert: Converter | None, upright: bool
) -> Iterator[tuple[int, int, _Pixels]]:
    """Yield a part of a picture in converted strips: where each begins in the part, its thickness
    and its pixels.

    The first pass takes every row (or, `upright`, every column) by itself, so that strips of them
    can go through it in turn. A picture that needs no conversion and is in one piece of memory is
    one strip, not copied.
    """
    left, top, right, bottom = part
    if convert is None:
        try:
            whole = _pixels(image)
        except ValueError:
            pass  # A large picture is in several pieces of memory; a strip is in one.
        else:
            address = whole.address + top * whole.stride + left * whole.bands
            yield 0, right - left if upright else bottom - top, whole._replace(address=address)
            return
    begin, end, across = (left, right, bottom - top) if upright else (top, bottom, right - left)
    step = max(1, _STRIP_PIXELS // across)
    for start in range(begin, end, step):
        stop = min(start + step, end)
        strip = image.crop((start, top, stop, bottom) if upright else (left, start, right, stop))
        yield start - begin, stop - start, _pixels(strip if convert is None else convert(strip))


class _ArrowArray(ctypes.Structure):
    """The C data interface of Apache Arrow, by which Pillow shows its memory without a copy."""


_ArrowArray._fields_ = [
    *(
        (name, ctypes.c_int64)
        for name in ("length", "null_count", "offset", "n_buffers", "n_children")
    ),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.POINTER(ctypes.POINTER(_ArrowArray))),
    *((name, ctypes.c_void_p) for name in ("dictionary", "release", "private_data")),
]

_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def _pixels(image: Image.Image) -> _Pixels:
    """Return the memory of a picture in L or RGB; Pillow keeps the latter as four bytes a pixel.

    Raises:
        ValueError: it is not in one piece.
    """
    _, capsule = image.__arrow_c_array__()
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    bands = 1
    if array.n_children:
        array, bands = array.children[0].contents, 4
    return _Pixels(array.buffers[1], image.width * bands, bands, capsule)


def _apply(
    source: _Pixels, extent: int, made: _Pass, result: NDArray[np.uint8], *, vertical: bool
) -> None:
    """Make a pass along the height of rows of `extent` bytes, or along the width of `extent` rows."""
    assert _KERNEL is not None
    places = (source.address, source.stride, result.ctypes.data, result.strides[0], extent)
    tables = (*made.weights.shape, made.first.ctypes.data, made.weights.ctypes.data)
    if vertical:
        _KERNEL.resample_rows(*places, *tables)
    else:
        _KERNEL.resample_columns(*places, source.bands, *tables)


def _bicubic(x: Floats) -> Floats:
    x = np.abs(x)
    inner = (1.5 * x - 2.5) * x * x + 1
    return np.where(x < 1.0, inner, np.where(x < 2.0, (((x - 5) * x + 8) * x - 4) * -0.5, 0.0))


# Radius of each filter, in output pixels when it shrinks, and its function (Pillow's
# libImaging/Resample.c).
_FILTERS: dict[Image.Resampling, tuple[float, Callable[[Floats], Floats]]] = {
    Image.Resampling.BILINEAR: (1.0, lambda x: np.maximum(1.0 - np.abs(x), 0.0)),
    Image.Resampling.BICUBIC: (2.0, _bicubic),
}


@lru_cache(maxsize=32)
def _pass(source: int, axis: Axis, resample: Image.Resampling) -> _Pass | None:
    """Return the pass along an axis of `source` pixels, as Pillow's `precompute_coeffs` makes it;
    None: not supported.

    The order of operations is Pillow's, as the last bit counts.
    """
    if resample not in _FILTERS:
        return None
    radius, function = _FILTERS[resample]
    low, high = np.float32(axis.low), np.float32(axis.high)
    scale = float(high - low) / axis.size
    filter_scale = max(scale, 1.0)
    support = radius * filter_scale
    if axis.length * min(source, 2 * math.ceil(support) + 1) > _MAX_WEIGHTS:
        return None
    centre = float(low) + (np.arange(axis.first, axis.first + axis.length) + 0.5) * scale
    begin = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), source)
    taps = int((end - begin).max())
    first = np.minimum(begin, source - taps)
    position = first + np.arange(taps)[:, np.newaxis]
    weights = function((position - centre + 0.5) * (1.0 / filter_scale))
    weights[(position < begin) | (position >= end)] = 0.0
    total = weights.cumsum(axis=0)[-1]  # one after the other, as `sum` would not
    np.divide(weights, total, out=weights, where=total != 0.0)
    fixed = (weights * (1 << 22) + np.where(weights < 0.0, -0.5, 0.5)).astype(np.int32)
    if axis.mirrored:
        first, fixed = source - taps - first, fixed[::-1]
    return _Pass(first.astype(np.int32), np.ascontiguousarray(fixed.T))


def _load() -> ctypes.CDLL | None:
    """Return the compiled kernel, if it was built and this processor runs it."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_resample{suffix}")
        try:
            kernel = ctypes.CDLL(str(path)) if path.exists() else None
        except OSError:  # built for another machine
            kernel = None
        if kernel is not None and kernel.resample_supported():
            number, pointer, step = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
            kernel.resample_columns.argtypes = [
                pointer,
                step,
                pointer,
                step,
                *[number] * 4,
                pointer,
                pointer,
            ]
            kernel.resample_rows.argtypes = [
                pointer,
                step,
                pointer,
                step,
                step,
                number,
                number,
                pointer,
                pointer,
            ]
            kernel.resample_columns.restype = kernel.resample_rows.restype = None
            return kernel
    return None


def _agrees() -> bool:
    """Return whether this Pillow, which may be another than 13, gives the kernel's levels for a
    small picture.
    """
    picture = Image.frombytes(
        "RGB", (23, 17), bytes(pixel * pixel % 251 for pixel in range(23 * 17 * 3))
    )
    for filter_ in _FILTERS:
        for width, height in ((9, 13), (40, 5)):
            columns, rows = Axis(0, 23, width, 0, width), Axis(0, 17, height, 0, height)
            rows_first = passes_rows_first(picture.size, (width, height))
            levels = resample_part(picture, columns, rows, filter_, rows_first=rows_first)
            if (
                levels is None
                or levels.tobytes() != picture.resize((width, height), filter_).tobytes()
            ):
                return False
    return True


_KERNEL = _load()
if _KERNEL is not None and not _agrees():
    _KERNEL = None
