"""Pillow's resampling in a compiled kernel: the same pixel values, several times as fast.

Pillow multiplies pixels by integer weights of 22 binary places, sums in 32-bit integers, and rounds
to uint8 after each of two passes (its libImaging/Resample.c). The kernel (`resample.c`) does the
same with eight sums at once; this module computes its weights. The kernel runs on x86-64 with AVX2,
if a C compiler was present when the package was installed. Otherwise, and when `resample_part`
returns None, Pillow resizes.
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

# Pixels that are cropped and converted at once. This bounds the additional memory per picture.
STRIP_PIXELS = 4_000_000

# If more pixels lie between the two passes, the order of passes with fewer pixels is used.
_MAX_INTERMEDIATE_PIXELS = 16_000_000

# Most weights of a pass: enough for a bicubic resize of 24,000 pixels. Pillow computes larger
# passes.
_MAX_WEIGHTS = 98_304

Floats = NDArray[np.float64]


class Axis(NamedTuple):
    """A resize along one axis of a picture.

    Attributes:
        low, high: resized part of the picture, in pixels along the upright picture.
        size: number of pixels after the resize.
        first, length: the pixels to compute, out of `size`.
        mirrored: whether the stored picture runs in the opposite direction to the upright picture.
    """

    low: float
    high: float
    size: int
    first: int
    length: int
    mirrored: bool = False


class _Pass(NamedTuple):
    """A pass along one axis of N output pixels.

    Attributes:
        first: first input pixel of each output pixel, int32 [N].
        weights: weights of the input pixels, int32 [N, taps].
    """

    first: NDArray[np.int32]
    weights: NDArray[np.int32]

    @property
    def span(self) -> tuple[int, int]:
        """The first input pixel, and the index after the last."""
        return int(self.first.min()), int(self.first.max()) + self.weights.shape[1]


class _Pixels(NamedTuple):
    """uint8 pixels in rows.

    Attributes:
        address: of the first pixel.
        stride: bytes from one row to the next.
        bands: bytes per pixel: 1, 3 or 4.
        owner: object that keeps the memory alive.
    """

    address: int
    stride: int
    bands: int
    owner: object


def passes_rows_first(source: tuple[int, int], target: tuple[int, int]) -> bool:
    """Return whether Pillow (13) resizes vertically first, then horizontally.

    Each pass rounds to uint8 and clips overshoots. Therefore the order changes a few levels where
    neighbouring pixels differ most.

    Args:
        source, target: (width, height) before and after the resize.
    """
    width, height = source
    new_width, new_height = target
    return new_height < height and height - new_height > 2 * (width - new_width)


def is_compiled() -> bool:
    """Return whether the compiled kernel is in use."""
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
    """Return a part of the picture that Pillow would turn, convert and resize as a whole.

    Only the part is computed, in bounded memory. Thread-safe; releases the interpreter's lock.

    Args:
        image: loaded.
        columns, rows: along the width and the height of the stored `image`.
        rows_first: resize vertically first. Ignored if the picture between the passes would be
            huge.
        convert: converts any piece of `image` to L or RGB; None if the image has one of these
            modes.

    Returns:
        uint8 [rows.length, columns.length, 1 or 3], C-contiguous, along a mirrored axis in the
        upright picture's order. None if the kernel does not support this resize.
    """
    across = _pass(image.width, columns, resample)
    down = _pass(image.height, rows, resample)
    if _KERNEL is None or across is None or down is None:
        return None
    left, right = across.span
    top, bottom = down.span
    across = across._replace(first=across.first - left)
    down = down._replace(first=down.first - top)
    after_rows = (rows.length, right - left)
    after_columns = (bottom - top, columns.length)
    if math.prod(after_rows if rows_first else after_columns) > _MAX_INTERMEDIATE_PIXELS:
        rows_first = math.prod(after_rows) < math.prod(after_columns)

    shape = after_rows if rows_first else after_columns
    middle: NDArray[np.uint8] | None = None
    for start, size, piece in _strips(image, (left, top, right, bottom), convert, rows_first):
        if middle is None:
            # A pass along the width keeps three of four bytes per pixel.
            bands = piece.bands if rows_first else min(piece.bands, 3)
            middle = np.empty((*shape, bands), np.uint8)
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
    image: Image.Image, part: tuple[int, int, int, int], convert: Converter | None, by_columns: bool
) -> Iterator[tuple[int, int, _Pixels]]:
    """Yield a part of a picture in converted strips: start in the part, thickness, pixels.

    Strips have whole rows, or with `by_columns` whole columns, because the first pass computes each
    of these separately. A picture that needs no conversion and is in one piece of memory is one
    strip, not copied.
    """
    left, top, right, bottom = part
    if convert is None:
        try:
            whole = _pixels(image)
        except ValueError:
            pass  # a large picture is in several pieces of memory, but a strip is in one
        else:
            address = whole.address + top * whole.stride + left * whole.bands
            thickness = right - left if by_columns else bottom - top
            yield 0, thickness, whole._replace(address=address)
            return
    begin, end, length = (left, right, bottom - top) if by_columns else (top, bottom, right - left)
    step = max(1, STRIP_PIXELS // length)
    for start in range(begin, end, step):
        stop = min(start + step, end)
        strip = image.crop((start, top, stop, bottom) if by_columns else (left, start, right, stop))
        if convert is not None:
            strip = convert(strip)
        yield start - begin, stop - start, _pixels(strip)


class _ArrowArray(ctypes.Structure):
    """The C data interface of Apache Arrow, with which Pillow exposes its memory without a copy."""


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
    """Return the memory of a picture in L, or in RGB, which Pillow stores as four bytes per pixel.

    Raises:
        ValueError: the picture is not in one piece of memory.
    """
    _, capsule = image.__arrow_c_array__()
    array = _ArrowArray.from_address(_capsule_pointer(capsule, b"arrow_array"))
    bands = 1
    if array.n_children:
        array = array.children[0].contents
        bands = 4
    return _Pixels(array.buffers[1], image.width * bands, bands, capsule)


def _apply(
    source: _Pixels, extent: int, pass_: _Pass, result: NDArray[np.uint8], *, vertical: bool
) -> None:
    """Run a pass.

    Args:
        extent: bytes per row of a vertical pass, or rows of a horizontal pass.
        result: uint8 [rows, columns, bands], to write to.
        vertical: along the height, not along the width.
    """
    assert _KERNEL is not None
    memory = (source.address, source.stride, result.ctypes.data, result.strides[0], extent)
    tables = (*pass_.weights.shape, pass_.first.ctypes.data, pass_.weights.ctypes.data)
    if vertical:
        _KERNEL.resample_rows(*memory, *tables)
    else:
        _KERNEL.resample_columns(*memory, source.bands, *tables)


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
    """Return the pass along an axis of `source` pixels, like Pillow's `precompute_coeffs`.

    The order of operations is Pillow's, because the last bit counts. Return None if the kernel does
    not support this pass.
    """
    if resample not in _FILTERS:
        return None
    radius, function = _FILTERS[resample]
    low = np.float32(axis.low)
    high = np.float32(axis.high)
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
    total = weights.cumsum(axis=0)[-1]  # adds one by one, unlike `sum`
    np.divide(weights, total, out=weights, where=total != 0.0)
    fixed = (weights * (1 << 22) + np.where(weights < 0.0, -0.5, 0.5)).astype(np.int32)
    if axis.mirrored:
        first = source - taps - first
        fixed = fixed[::-1]
    return _Pass(first.astype(np.int32), np.ascontiguousarray(fixed.T))


def load_kernel() -> ctypes.CDLL | None:
    """Return the compiled kernel, if it was built and this processor can run it."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_resample{suffix}")
        if not path.exists():
            continue
        try:
            kernel = ctypes.CDLL(str(path))
        except OSError:  # built for another machine
            continue
        if not kernel.resample_supported():
            continue
        number = ctypes.c_int32
        step = ctypes.c_int64
        rows = (ctypes.c_void_p, step)
        tables = (number, number, ctypes.c_void_p, ctypes.c_void_p)
        kernel.resample_columns.argtypes = (*rows, *rows, number, number, *tables)
        kernel.resample_rows.argtypes = (*rows, *rows, step, *tables)
        kernel.resample_columns.restype = None
        kernel.resample_rows.restype = None
        return kernel
    return None


def _agrees() -> bool:
    """Return whether this version of Pillow gives the kernel's pixel values for a small picture."""
    picture = Image.frombytes(
        "RGB", (23, 17), bytes(pixel * pixel % 251 for pixel in range(23 * 17 * 3))
    )
    for filter_ in _FILTERS:
        for width, height in ((9, 13), (40, 5)):
            columns = Axis(0, 23, width, 0, width)
            rows = Axis(0, 17, height, 0, height)
            rows_first = passes_rows_first(picture.size, (width, height))
            levels = resample_part(picture, columns, rows, filter_, rows_first=rows_first)
            expected = picture.resize((width, height), filter_).tobytes()
            if levels is None or levels.tobytes() != expected:
                return False
    return True


_KERNEL = load_kernel()
if _KERNEL is not None and not _agrees():
    _KERNEL = None
