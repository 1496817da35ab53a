"""Several drawings in one picture: maps in a row, or a contact sheet. PIL, never torch."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, ImageOps

from model.images.caption import caption_of, fit_text
from model.images.heatmap import MAX_SIZE, Look, draw_heatmap, full_scale
from model.images.preprocess import Region
from model.outputs import AttentionMap

# White pixels between two maps of a row.
_ROW_GAP: Final = 4

# White pixels between two pictures of a sheet.
_GAP: Final = 8

# Cell height in pixels on a sheet of few pictures.
_MAX_CELL: Final = 320

# Limit of each side of a sheet in pixels. The cells shrink when there are many pictures.
_MAX_SHEET: Final = 8192


def draw_maps(
    maps: Sequence[AttentionMap],
    labels: Sequence[str] | None,
    *,
    picture: NDArray[np.uint8],
    region: Region | None = None,
    overlay: bool = True,
    name: str | None = None,
    max_width: int | None = None,
    **look: Any,
) -> Image.Image:
    """Return maps of one picture in a row, with one colour scale.

    Args:
        labels: the model's labels, for captions; None draws no captions.
        picture, region: see `draw_heatmap`.
        overlay: whether to draw the maps over the picture.
        name: name of the picture. The picture itself is then drawn first, without a map.
        max_width: limit of the row's width in pixels; drawings wider than their share are shrunk.
        look: the attributes of `Look`.
    """
    map_look = Look(**look)
    count = len(maps) + (name is not None)
    share = MAX_SIZE if max_width is None else (max_width - _ROW_GAP * (count - 1)) // count
    draw = partial(
        draw_heatmap,
        region=region,
        scale=max(full_scale(map_.values) for map_ in maps),
        max_width=share,
    )
    drawings = [
        draw(
            map_.values,
            map_look,
            picture=picture if overlay else None,
            caption=caption_of(map_, labels) if labels else (),
            evidence=1.0 if map_.evidence is None else map_.evidence,
        )
        for map_ in maps
    ]
    if name is not None:
        plain_look = Look(alpha=0.0, size=map_look.size)
        caption = (name,) if labels else ()
        plain = draw(maps[0].values, plain_look, picture=picture, caption=caption)
        drawings.insert(0, plain)
    if count == 1:
        return drawings[0]
    # A caption may have widened a drawing.
    drawings = [_narrowed(drawing, share) for drawing in drawings]
    width = sum(drawing.width + _ROW_GAP for drawing in drawings) - _ROW_GAP
    row = Image.new("RGB", (width, max(drawing.height for drawing in drawings)), "white")
    left = 0
    for drawing in drawings:
        row.paste(drawing, (left, 0))
        left += drawing.width + _ROW_GAP
    return row


def _narrowed(drawing: Image.Image, width: int) -> Image.Image:
    """Return the drawing, shrunk to `width` pixels if it is wider."""
    if drawing.width <= width:
        return drawing
    return drawing.resize((width, max(1, round(drawing.height * width / drawing.width))))


class ContactSheet:
    """A grid of small pictures with captions, which keeps none of the pictures themselves.

    Its memory is bounded for any number of pictures.

    Args:
        count: number of cells.
        shape: (width, height) of the cells' shape; pictures of another shape are fitted into it.

    Attributes:
        image: the sheet with the pictures added so far.
    """

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        width, height = shape
        self._columns = min(count, max(1, round(math.sqrt(count * height / width))))
        rows = math.ceil(count / self._columns)
        # The caption takes at most a quarter of a picture's height.
        scale = min(
            _MAX_CELL / height,
            (_MAX_SHEET / self._columns - _GAP) / width,
            (_MAX_SHEET / rows - _GAP) / height / 1.25,
        )
        cell_width = max(1, int(width * scale))
        cell_height = max(1, int(height * scale))
        text_size = min(13, max(1, cell_height // 10))
        self._font = ImageFont.load_default(text_size)
        self._line_height = round(text_size * 1.25)
        self._cell = (cell_width, cell_height)
        self._step = (cell_width + _GAP, cell_height + 2 * self._line_height + _GAP)
        self._filled = 0
        sheet_size = (self._columns * self._step[0] + _GAP, rows * self._step[1] + _GAP)
        self.image = Image.new("RGB", sheet_size, "white")

    def add(self, picture: Image.Image, *lines: str) -> None:
        """Add a picture in the next cell, with at most two lines below it.

        Each line is cut to the cell's width.
        """
        row, column = divmod(self._filled, self._columns)
        left = _GAP + column * self._step[0]
        top = _GAP + row * self._step[1]
        padded = ImageOps.pad(picture.convert("RGB"), self._cell, color="white")
        self.image.paste(padded, (left, top))
        pen = ImageDraw.Draw(self.image)
        for number, line in enumerate(lines[:2]):
            corner = (left, top + self._cell[1] + number * self._line_height)
            pen.text(corner, fit_text(line, self._font, self._cell[0]), "black", self._font)
        self._filled += 1
