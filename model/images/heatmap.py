"""Heat maps: attention maps in colour over a picture. PIL and numpy, never torch.

The colour tables have matplotlib's names and colours. Each row of `colormaps.png` is a table, in
the order of `COLORMAPS`. The file was generated with matplotlib 3.11.2 as
`colormaps[name](range(256), bytes=True)[:, :3]`, so that serving needs no plotting library. Sources
of the tables:

* viridis, plasma, inferno, magma: Nathaniel J. Smith, Stefan van der Walt and Eric Firing, 2015,
  CC0 (https://bids.github.io/colormap/). Perceptually uniform.
* cividis: Nunez, Anderton and Renslow, 2018 (https://doi.org/10.1371/journal.pone.0199239). Looks
  alike to readers with and without colour blindness.
* turbo: Anton Mikhailov, Google, 2019, Apache-2.0.
* jet, hot, bone, gray: older piecewise linear functions, as matplotlib computes them.
"""

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.errors import InputError
from model.images.caption import caption_height, with_caption
from model.images.preprocess import Region

COLORMAPS = (
    "viridis",
    "plasma",
    "inferno",
    "magma",
    "cividis",
    "turbo",
    "jet",
    "hot",
    "bone",
    "gray",
)

# Longest side of a heat map in pixels.
MAX_SIZE = 2048

# If the model's input has a longer side of at least this many pixels, maps are drawn over the input
# by default; below it, over the photo.
_SMALL_INPUT = 128

# Smallest default of the longer side in pixels: patches stay visible on small pictures.
_MIN_DEFAULT_SIZE = 384

# The scale ends at this multiple of the even share or above, so that a nearly even map stays pale.
_MIN_FULL_SCALE = 4.0

# Brightness of the part of a photo that the model did not see.
_DIMMED = 0.35

# Values along a side of each patch in a smooth map; pixels are interpolated linearly between them.
_ZOOM = 9


@dataclass(frozen=True, slots=True)
class Look:
    """The caller's choices for a drawing.

    Attributes:
        alpha: 0...1, opacity of the last colour over the picture.
        size: longer side of the result in pixels, at most `MAX_SIZE`. None keeps the size of the
            picture in the result, but makes its longer side at least 384.
        smooth: blend from patch to patch; otherwise each patch is one square.

    Raises:
        InputError: `colormap` is not one of `COLORMAPS`.
    """

    colormap: str = "turbo"
    alpha: float = 0.7
    size: int | None = None
    smooth: bool = True

    def __post_init__(self) -> None:
        colour_table(self.colormap)


def default_view(image_size: tuple[int, int]) -> Literal["input", "photo"]:
    """Return the default view: the photo for small inputs, else the model's input."""
    return "photo" if max(image_size) < _SMALL_INPUT else "input"


def draw_heatmap(
    values: NDArray[np.float32],
    look: Look,
    *,
    picture: NDArray[np.uint8] | None,
    region: Region | None = None,
    caption: Sequence[str] = (),
    scale: float | None = None,
    max_width: int = MAX_SIZE,
    evidence: float = 1.0,
) -> Image.Image:
    """Return a map drawn over a picture.

    Let r be a patch's multiple of the even share, 1 / (rows * columns), and let s = log(r) /
    log(scale). The patch has the colour at s in the table and the opacity `alpha` times `evidence`
    times s. Patches with the even share or less leave the picture unchanged, so an even map changes
    nothing.

    Args:
        values: float [grid rows, grid columns]; only ratios count. Negative and non-finite values
            count as 0.
        picture: uint8 [H, W, 3], or [H, W, 1] for grey, drawn under the map. None draws the map
            only, with square patches.
        region: the part of `picture` that the map covers, in its pixels; the rest is dimmed. None:
            all.
        caption: lines to write below, followed by the colours in words if there are any. Small
            drawings get no caption.
        scale: multiple of the even share at the last colour; None: `full_scale` of the map.
        max_width: limit of the picture's width in the result, in pixels.
        evidence: 0...1, see `AttentionMap`. Without a picture, colours fade to the first colour.

    Returns:
        An RGB image; without a caption, it has the picture's aspect ratio.
    """
    rows, columns = values.shape if picture is None else picture.shape[:2]
    longer = look.size or min(max(rows, columns, _MIN_DEFAULT_SIZE), MAX_SIZE)
    longer = max(1, min(longer, round(max_width * max(rows, columns) / columns)))
    below = caption_height(longer) if caption else 0
    max_height = (longer if look.size else MAX_SIZE) - below
    factor = min(longer / max(rows, columns), max_height / rows)
    size = (max(1, round(columns * factor)), max(1, round(rows * factor)))

    ratios = _ratios(values)
    scale = scale or full_scale(values)
    levels = (np.log(ratios.clip(1.0, scale)) / np.log(scale)).astype(np.float32)
    x, y, width, height = region or Region(0.0, 0.0, columns, rows)
    # Affine map from a pixel of the drawing to a position in the grid, in patches.
    across = values.shape[1] / width
    down = values.shape[0] / height
    affine = (across * columns / size[0], 0.0, -x * across, 0.0, down * rows / size[1], -y * down)
    grid = Image.fromarray(levels)
    if look.smooth:
        fine = grid.resize((_ZOOM * grid.width, _ZOOM * grid.height), Image.Resampling.BICUBIC)
        finer = [_ZOOM * factor for factor in affine]
        grid = fine.transform(size, Image.Transform.AFFINE, finer, Image.Resampling.BILINEAR)
    else:
        grid = grid.transform(size, Image.Transform.AFFINE, affine)
    index = np.rint(255 * np.asarray(grid).clip(0, 1)).astype(np.uint8)
    colours = colour_table(look.colormap)
    opacity = look.alpha * evidence
    if picture is None:
        drawing = Image.fromarray(colours[np.rint(evidence * index).astype(np.uint8)])
    else:
        inside = Image.new("L", values.shape[::-1], 255)
        inside = inside.transform(size, Image.Transform.AFFINE, affine)
        mask = Image.fromarray(np.rint(opacity * index).astype(np.uint8))
        background = _background(picture, size, inside)
        drawing = Image.composite(Image.fromarray(colours[index]), background, mask)
    if below:
        peak = float(ratios.max()) if opacity or picture is None else None
        drawing = with_caption(drawing, caption, colours, peak, longer=longer)
    return drawing


def _background(
    picture: NDArray[np.uint8], size: tuple[int, int], inside: Image.Image
) -> Image.Image:
    """Return the picture in RGB at this (width, height), dimmed where the mask `inside` is 0."""
    if picture.shape[2] == 1:
        picture = picture[:, :, 0]
    bright = Image.fromarray(picture).convert("RGB").resize(size, Image.Resampling.BICUBIC)
    dimmed = bright.point(lambda level: int(_DIMMED * level))
    return Image.composite(bright, dimmed, inside)


def full_scale(values: NDArray[np.float32]) -> float:
    """Return the multiple of the even share at the last colour: the highest patch's, at least 4.

    Args:
        values: see `draw_heatmap`.
    """
    return max(_MIN_FULL_SCALE, float(_ratios(values).max()))


def encode_png(drawing: Image.Image) -> bytes:
    """Return a drawing as a PNG."""
    encoded = io.BytesIO()
    # Run lengths take two thirds of the time of zlib's default strategy, and overlays get smaller.
    drawing.save(encoded, "PNG", compress_level=4, compress_type=zlib.Z_RLE)
    return encoded.getvalue()


def _ratios(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return each patch's multiple of the even share."""
    # The sum of a float32 map may overflow float32, so use float64.
    shares = values.astype(np.float64)
    shares[~np.isfinite(shares) | (shares < 0)] = 0.0
    mean = shares.mean()
    # A mean below the smallest normal number makes quotients meaningless.
    return shares / mean if mean > np.finfo(np.float64).tiny else np.ones_like(shares)


@cache
def colour_table(name: str) -> NDArray[np.uint8]:
    """Return the colours of a map, lowest value first: uint8 [256, 3] RGB, read-only.

    Raises:
        InputError: `name` is not one of `COLORMAPS`.
    """
    if name not in COLORMAPS:
        raise InputError(
            "colormap", f"colormap {name!r} is not offered; one of: {', '.join(COLORMAPS)}"
        )
    with Image.open(Path(__file__).with_name("colormaps.png")) as tables:
        table: NDArray[np.uint8] = np.asarray(tables)[COLORMAPS.index(name)]
    return table
