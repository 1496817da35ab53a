"""Heat maps: a map of where the model looked, in colour over a picture. PIL and numpy, never torch.

The colour tables have matplotlib's names and colours. Each row of `colormaps.png` is a table, in
the order of `COLORMAPS`. They were generated once with matplotlib 3.11.2 as
`colormaps[name](range(256), bytes=True)[:, :3]`, so that serving needs no plotting library. Where
they come from:

* viridis, plasma, inferno, magma: Nathaniel J. Smith, Stefan van der Walt and Eric Firing, 2015, CC0
  (https://bids.github.io/colormap/). Perceptually uniform.
* cividis: Nunez, Anderton and Renslow, 2018 (https://doi.org/10.1371/journal.pone.0199239). Looks alike to readers
  with and without colour blindness.
* turbo: Anton Mikhailov, Google, 2019, Apache-2.0.
* jet, hot, bone, gray: piecewise linear functions of old, as matplotlib computes them.
"""

import io
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

# Longer side in pixels of an input from which on it shows what is there; of a smaller one, the
# photo shows more.
_SMALL_INPUT = 128

# Longer side in pixels, at least, where no size is given: patches stay visible on small pictures.
_MIN_DEFAULT_SIZE = 384

# Times the even share, at least, that the last colour stands for: a map with less in it stays pale.
_MIN_FULL_SCALE = 4.0


# Values made along a side of each patch of a smooth map; pixels lie on straight lines between them.
_ZOOM = 9


@dataclass(frozen=True, slots=True)
class Look:
    """What a caller may choose of a drawing.

    Attributes:
        alpha: 0...1, how much the last colour covers the picture.
        size: longer side of the result in pixels, at most `MAX_SIZE`; None: that of the picture in
            it is the picture's own, or 384 if that is more.
        smooth: run from patch to patch without steps; otherwise each patch is one square.

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
    """Return what the maps of a model of this input size are drawn over by default, where there is
    a photo.
    """
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

    With r a patch's share over the even share, 1 / (rows * columns), the colour is that at log(r) /
    log(scale) of the table, and the map's opacity is `alpha` times `evidence` times the same
    number. Patches with the even share or less leave the picture as it is, so that an even map
    changes nothing.

    Args:
        values: float [grid rows, grid columns]; only ratios count. What is negative or not finite
        counts as 0.
        picture: uint8 [H, W, 3], or [H, W, 1] for grey, drawn under the map. None: the map alone,
            each patch as high as wide.
        region: the part of `picture` that the map covers, in its pixels; the rest is dimmed. None:
        the whole.
        caption: lines to write below, with the colours in words where they are drawn; a small
        drawing has no room.
        scale: how many times the even share the last colour stands for; None: `full_scale` of the
        map.
        max_width: pixels of the picture in the result at most.
        evidence: 0...1, see `AttentionMap`; without a picture below, colours fade to the first one.

    Returns:
        An RGB image; without a caption, it has the picture's aspect ratio.
    """
    rows, columns = values.shape if picture is None else picture.shape[:2]
    longer = look.size or min(max(rows, columns, _MIN_DEFAULT_SIZE), MAX_SIZE)
    longer = max(1, min(longer, round(max_width * max(rows, columns) / columns)))
    below = caption_height(longer) if caption else 0
    enlarged = min(
        longer / max(rows, columns), ((longer if look.size else MAX_SIZE) - below) / rows
    )
    size = max(1, round(columns * enlarged)), max(1, round(rows * enlarged))

    ratios = _ratios(values)
    scale = scale or full_scale(values)
    levels = (np.log(ratios.clip(1.0, scale)) / np.log(scale)).astype(np.float32)
    x, y, width, height = region or Region(0.0, 0.0, columns, rows)
    # From a pixel of the drawing to its place in the grid, in patches.
    across, down = values.shape[1] / width, values.shape[0] / height
    place = (across * columns / size[0], 0.0, -x * across, 0.0, down * rows / size[1], -y * down)
    grid = Image.fromarray(levels)
    if look.smooth:
        fine = grid.resize((_ZOOM * grid.width, _ZOOM * grid.height), Image.Resampling.BICUBIC)
        finer = [_ZOOM * each for each in place]
        grid = fine.transform(size, Image.Transform.AFFINE, finer, Image.Resampling.BILINEAR)
    else:
        grid = grid.transform(size, Image.Transform.AFFINE, place)
    index = np.rint(255 * np.asarray(grid).clip(0, 1)).astype(np.uint8)
    colours, opacity = colour_table(look.colormap), look.alpha * evidence
    drawing = Image.fromarray(
        colours[np.rint(evidence * index).astype(np.uint8) if picture is None else index]
    )
    if picture is not None:
        under = Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).convert(
            "RGB"
        )
        under = under.resize(size, Image.Resampling.BICUBIC)
        seen = Image.new("L", values.shape[::-1], 255).transform(
            size, Image.Transform.AFFINE, place
        )
        # Brightness of the part of a photo that the model did not see.
        under = Image.composite(under, under.point(lambda level: int(0.35 * level)), seen)
        drawing = Image.composite(
            drawing, under, Image.fromarray(np.rint(opacity * index).astype(np.uint8))
        )
    if below:
        peak = float(ratios.max()) if opacity or picture is None else None
        drawing = with_caption(drawing, caption, colours, peak, longer=longer)
    return drawing


def full_scale(values: NDArray[np.float32]) -> float:
    """Return how many times the even share the last colour of a map's drawing stands for: its
    highest patch's, or 4.

    Args:
        values: see `draw_heatmap`.
    """
    return max(_MIN_FULL_SCALE, float(_ratios(values).max()))


def encode_png(drawing: Image.Image) -> bytes:
    """Return a drawing as a PNG."""
    encoded = io.BytesIO()
    # A level of zlib, 1...9: overlays get no smaller beyond it, only slower (6 takes three times as
    # long).
    drawing.save(encoded, "PNG", compress_level=4)
    return encoded.getvalue()


def _ratios(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return how many times the even share each patch has."""
    # In double: the sum of a float32 map may exceed float32.
    shares = values.astype(np.float64)
    shares[~np.isfinite(shares) | (shares < 0)] = 0.0
    mean = shares.mean()
    # Below the smallest normal number, a quotient is no longer good for a picture.
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
