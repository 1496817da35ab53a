"""Heat maps: an attention map in colour over the model's input picture. PIL and numpy, never torch."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import InputError
from model.images.colormaps import COLORMAPS, colour_table
from model.images.control import UNCONTROLLED, WorkControl

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["COLORMAPS", "MAX_SIZE", "render_heatmap"]

MAX_SIZE = 2048
"""Longest side of a heat map in pixels."""

_MIN_DEFAULT_SIZE = 384
"""Longer side in pixels, at least, where no size is asked for: patches stay visible on small pictures."""

_COMPRESS_LEVEL = 4
"""One of zlib's 1...9: overlays get no smaller beyond it, only slower (6 takes three times as long)."""


def render_heatmap(
    values: NDArray[np.float32],
    *,
    picture: NDArray[np.uint8] | None,
    colormap: str = "inferno",
    alpha: float = 0.6,
    size: int | None = None,
    control: WorkControl = UNCONTROLLED,
) -> bytes:
    """Return an attention map drawn as a PNG.

    The map is scaled from its own minimum and maximum to the whole colour table (a constant map gets the lowest
    colour) and enlarged by bicubic interpolation; each value stands in the middle of its patch.

    Args:
        values: float [grid rows, grid columns]; any range. What is not finite counts as the minimum.
        picture: uint8 [H, W, 3], or [H, W, 1] for grey: what the model saw, drawn under the map. None: the map
            alone, a square for each patch.
        alpha: 0...1, how much the map covers the picture.
        size: longer side in pixels, at most `MAX_SIZE`; None: the picture's, or 384 if that is more.
        control: may end the work between its steps. What it raises is raised here.

    Returns:
        An RGB PNG with the picture's aspect ratio.

    Raises:
        InputError: `colormap`, `alpha` or `size` is outside what is offered.
    """
    if not 0.0 <= alpha <= 1.0:  # also refuses NaN
        raise InputError("alpha", f"alpha {alpha} is not between 0 and 1")
    if size is not None and not 1 <= size <= MAX_SIZE:
        raise InputError("size", f"size {size} is not between 1 and {MAX_SIZE}")
    colours = colour_table(colormap)

    rows, columns = values.shape if picture is None else picture.shape[:2]
    longer = min(max(rows, columns, _MIN_DEFAULT_SIZE), MAX_SIZE) if size is None else size
    width, height = (max(1, round(side * longer / max(rows, columns))) for side in (columns, rows))

    control.check()
    levels = Image.fromarray(_scaled(values)).resize((width, height), Image.Resampling.BICUBIC)
    # Bicubic interpolation overshoots at steep edges.
    heat = colours[np.asarray(levels).clip(0, 255).round().astype(np.uint8)]
    drawing = Image.fromarray(heat)
    control.check()
    if picture is not None:
        seen = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).convert("RGB")
        drawing = Image.blend(seen.resize((width, height), Image.Resampling.BICUBIC), drawing, alpha)
    encoded = _ControlledOutput(control)
    drawing.save(encoded, "PNG", compress_level=_COMPRESS_LEVEL)
    return encoded.getvalue()


class _ControlledOutput(io.BytesIO):
    """A file in memory that asks its control with every write, of which the encoder makes one for each 64 KiB."""

    def __init__(self, control: WorkControl) -> None:
        super().__init__()
        self._control = control

    def write(self, data: ReadableBuffer, /) -> int:
        self._control.check()
        return super().write(data)


def _scaled(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the map scaled to 0...255, float32 of the same shape."""
    finite = np.isfinite(values)
    # In double: the span of a float32 map may exceed float32.
    doubled = values.astype(np.float64)
    low, high = doubled[finite].min(initial=np.inf), doubled[finite].max(initial=-np.inf)
    if high <= low:  # a constant map, or one without finite values
        return np.zeros(values.shape, np.float32)
    return (np.where(finite, (doubled - low) / (high - low), 0.0) * 255.0).astype(np.float32)
