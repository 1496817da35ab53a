"""Pillow's resampling in a compiled kernel: the same levels, several times as fast.

Pillow weighs pixels with integers of 22 binary places, sums in 32-bit integers, and rounds to uint8 after each of two
passes (its libImaging/Resample.c). So does the kernel (`resample.c`), eight sums at once; its weights are made here.
It runs on x86-64 with AVX2, if there was a C compiler when the package was installed. Elsewhere, and for what
`resample_part` returns None for, Pillow resizes.
"""

from __future__ import annotations

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

from model.images.colour import Converter
from model.images.resize import MAX_INTERMEDIATE_PIXELS, SUPPORT, passes_rows_first, strips

_MAX_WEIGHTS = 98_304
"""Weights of a pass, at most: those of a bicubic resize of 24,000 pixels. Pillow makes larger passes."""


class Axis(NamedTuple):
    """What is asked along one axis of a picture as it is stored.

    Attributes:
        low, high: the part of the picture that is resized, in pixels, counted along the upright picture.
        size: pixels that the part becomes.
        first, length: the pixels of those that are computed.
        mirrored: the upright picture runs the other way.
    """

    low: float
    high: float
    size: int
    first: int
    length: int
    mirrored: bool = False


class _Pass(NamedTuple):
    """For each pixel of the result the first that it is made from, int32 [N], and the weights, int32 [N, taps]."""

    first: NDArray[np.int32]
    weights: NDArray[np.int32]

    @property
    def span(self) -> tuple[int, int]:
        """The first pixel that is read, and the one behind the last."""
        return int(self.first.min()), int(self.first.max()) + self.weights.shape[1]


class _Pixels(NamedTuple):
    """uint8 pixels of 1, 3 or 4 bytes, in rows that begin `stride` bytes apart; `owner` keeps them alive."""

    address: int
    stride: int
    bands: int
    owner: object


def resample_part(
    image: Image.Image,
    columns: Axis,
    rows: Axis,
    resample: Image.Resampling,
    *,
    rows_first: bool,
    convert: Converter | None = None,
) -> NDArray[np.uint8] | None:
    """Return a part of what Pillow makes of a picture that is turned, converted and resized whole; None: not supported.

    Only what the part needs is computed, in bounded memory. It is thread-safe and releases the interpreter's lock.

    Args:
        image: loaded.
        columns, rows: along the width and the height of `image`.
        rows_first: resize vertically first. Overruled where the picture between the passes would be huge.
        convert: makes L or RGB of any piece of `image`; None: it is one of the two.

    Returns:
        uint8 [rows.length, columns.length, 1 or 3], C-contiguous; along a mirrored axis in the upright picture's order.
    """
    if _KERNEL is None or resample not in _FILTERS:
        return None
    passes = [_pass(source, axis, resample) for source, axis in zip(image.size, (columns, rows), strict=True)]
    across, down = passes
    if across is None or down is None:
        return None
    (left, right), (top, bottom) = across.span, down.span
    across, down = _Pass(across.first - left, across.weights), _Pass(down.first - top, down.weights)
    between = (bottom - top) * columns.length, (right - left) * rows.length
    if between[rows_first] > MAX_INTERMEDIATE_PIXELS:
        rows_first = between[True] < between[False]

    middle: NDArray[np.uint8] | None = None
    try:
        for start, size, source in _sources(image, (left, top, right, bottom), convert, rows_first):
            if rows_first:
                if middle is None:
                    middle = np.empty((rows.length, right - left, source.bands), np.uint8)
                _resample_rows(source, size * source.bands, down, middle[:, start:])
            else:
                if middle is None:
                    middle = np.empty((bottom - top, columns.length, min(source.bands, 3)), np.uint8)
                _resample_columns(source, size, across, middle[start:])
    except ValueError:  # Pillow does not show its memory
        return None
    assert middle is not None
    source = _Pixels(middle.ctypes.data, middle.strides[0], middle.shape[2], middle)
    result = np.empty((rows.length, columns.length, min(source.bands, 3)), np.uint8)
    if rows_first:
        _resample_columns(source, rows.length, across, result)
    else:
        _resample_rows(source, source.stride, down, result)
    return result


def _sources(
    image: Image.Image, part: tuple[int, int, int, int], convert: Converter | None, rows_first: bool
) -> Iterator[tuple[int, int, _Pixels]]:
    """Yield the part of a picture in strips across the first pass: where each begins, its thickness and its pixels."""
    left, top, right, bottom = part
    if convert is None:
        try:
            whole = _pixels(image)
        except ValueError:
            pass  # A large picture is in several pieces of memory; a strip is in one.
        else:
            address = whole.address + top * whole.stride + left * whole.bands
            yield 0, right - left if rows_first else bottom - top, whole._replace(address=address)
            return
    for start, strip in strips(image, part, convert, rows_first):
        yield start, strip.width if rows_first else strip.height, _pixels(strip)


class _ArrowArray(ctypes.Structure):
    """The C data interface of Apache Arrow, by which Pillow shows its memory without a copy."""


_ArrowArray._fields_ = [
    *((name, ctypes.c_int64) for name in ("length", "null_count", "offset", "n_buffers", "n_children")),
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
    if image.readonly:  # Memory that is not Pillow's own, which Pillow before 13 shows at a wrong address.
        image = image.copy()
    _, capsule = image.__arrow_c_array__()
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    bands = 1
    if array.n_children:
        array, bands = array.children[0].contents, 4
    return _Pixels(array.buffers[1], image.width * bands, bands, capsule)


def _resample_columns(source: _Pixels, rows: int, made: _Pass, result: NDArray[np.uint8]) -> None:
    """Make a pass along the width of `rows` rows; of four bytes a pixel three are kept."""
    assert _KERNEL is not None
    _KERNEL.resample_columns(
        *source[:2], result.ctypes.data, result.strides[0], rows, source.bands,
        *made.weights.shape, made.first.ctypes.data, made.weights.ctypes.data,
    )  # fmt: skip


def _resample_rows(source: _Pixels, width: int, made: _Pass, result: NDArray[np.uint8]) -> None:
    """Make a pass along the height of rows of `width` bytes."""
    assert _KERNEL is not None
    _KERNEL.resample_rows(
        *source[:2], result.ctypes.data, result.strides[0], width,
        *made.weights.shape, made.first.ctypes.data, made.weights.ctypes.data,
    )  # fmt: skip


# --- weights --------------------------------------------------------------------------------------------------------


def _hamming(x: NDArray[np.float64]) -> NDArray[np.float64]:
    # Pillow's factors are 32-bit floats.
    window = float(np.float32(0.54)) + float(np.float32(0.46)) * _by_libm(math.cos, np.pi * np.abs(x))
    return np.where(np.abs(x) < 1.0, _sinc(np.abs(x)) * window, 0.0)


def _bicubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = np.abs(x)
    inner = (1.5 * x - 2.5) * x * x + 1
    return np.where(x < 1.0, inner, np.where(x < 2.0, (((x - 5) * x + 8) * x - 4) * -0.5, 0.0))


def _sinc(x: NDArray[np.float64]) -> NDArray[np.float64]:
    scaled = np.where(x == 0.0, 1.0, x * np.pi)
    return np.where(x == 0.0, 1.0, _by_libm(math.sin, scaled) / scaled)


def _by_libm(function: Callable[[float], float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what C's function gives, as Pillow calls it; NumPy's own may differ in the last bit."""
    return np.fromiter(map(function, x.ravel().tolist()), np.float64, x.size).reshape(x.shape)


_FILTERS: dict[Image.Resampling, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    Image.Resampling.BOX: lambda x: ((x > -0.5) & (x <= 0.5)).astype(np.float64),
    Image.Resampling.BILINEAR: lambda x: np.maximum(1.0 - np.abs(x), 0.0),
    Image.Resampling.HAMMING: _hamming,
    Image.Resampling.BICUBIC: _bicubic,
    Image.Resampling.LANCZOS: lambda x: np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0),
}


@lru_cache(maxsize=32)
def _pass(source: int, axis: Axis, resample: Image.Resampling) -> _Pass | None:
    """Return the pass along an axis of `source` pixels, as Pillow's `precompute_coeffs` makes it; None: too large.

    The order of operations is Pillow's, as the last bit counts.
    """
    low, high = np.float32(axis.low), np.float32(axis.high)
    scale = float(high - low) / axis.size
    filter_scale = max(scale, 1.0)
    support = SUPPORT[resample] * filter_scale
    if axis.length * min(source, 2 * math.ceil(support) + 1) > _MAX_WEIGHTS:
        return None
    centre = float(low) + (np.arange(axis.first, axis.first + axis.length) + 0.5) * scale
    begin = np.maximum((centre - support + 0.5).astype(np.int64), 0)
    end = np.minimum((centre + support + 0.5).astype(np.int64), source)
    taps = int((end - begin).max())
    first = np.minimum(begin, source - taps)
    position = first + np.arange(taps)[:, np.newaxis]
    weights = _FILTERS[resample]((position - centre + 0.5) * (1.0 / filter_scale))
    weights[(position < begin) | (position >= end)] = 0.0
    total = weights.cumsum(axis=0)[-1]  # one after the other, as `sum` would not
    np.divide(weights, total, out=weights, where=total != 0.0)
    fixed = (weights * (1 << 22) + np.where(weights < 0.0, -0.5, 0.5)).astype(np.int32)
    if axis.mirrored:
        first, fixed = source - taps - first, fixed[::-1]
    return _Pass(first.astype(np.int32), np.ascontiguousarray(fixed.T))


# --- the kernel -----------------------------------------------------------------------------------------------------


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
            kernel.resample_columns.argtypes = [pointer, step, pointer, step, *[number] * 4, pointer, pointer]
            kernel.resample_rows.argtypes = [pointer, step, pointer, step, step, number, number, pointer, pointer]
            kernel.resample_columns.restype = kernel.resample_rows.restype = None
            return kernel
    return None


def _agrees() -> bool:
    """Return whether this Pillow, which may be newer than this file, gives the kernel's levels for a small picture."""
    picture = Image.frombytes("RGB", (23, 17), bytes(pixel * pixel % 251 for pixel in range(23 * 17 * 3)))
    for filter_ in _FILTERS:
        for width, height in ((9, 13), (40, 5)):
            columns, rows = Axis(0, 23, width, 0, width), Axis(0, 17, height, 0, height)
            rows_first = passes_rows_first(picture.size, (width, height))
            levels = resample_part(picture, columns, rows, filter_, rows_first=rows_first)
            if levels is None or levels.tobytes() != picture.resize((width, height), filter_).tobytes():
                return False
    return True


_KERNEL = _load()
if _KERNEL is not None and not _agrees():
    _KERNEL = None
