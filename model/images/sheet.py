"""Several drawings in one picture: maps in a row, or a contact sheet with captions. PIL, never
torch.
"""

import math
from collections.abc import Sequence
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

# Pixels of a cell's height on a sheet of few pictures.
_MAX_CELL: Final = 320

# Pixels that a sheet has at most along each side: with many pictures, the cells get smaller.
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
    """Return maps of a picture side by side, their colours on one scale.

    Args:
        labels: of the model, for captions; None: without.
        picture, region: see `draw_heatmap`.
        overlay: whether the maps are drawn over the picture.
        name: of the picture, which then stands without a map before the others.
        max_width: pixels of the row at most: each drawing that has more than its share of them is
        made smaller.
        look: the attributes of `Look`.
    """
    chosen = Look(**look)
    scale = max(full_scale(each.values) for each in maps)
    panels: list[tuple[AttentionMap, Look, Sequence[str], bool]] = [
        (each, chosen, caption_of(each, labels) if labels else (), overlay) for each in maps
    ]
    if name is not None:
        panels.insert(
            0, (maps[0], Look(alpha=0.0, size=chosen.size), (name,) if labels else (), True)
        )
    share = (
        MAX_SIZE if max_width is None else (max_width - _ROW_GAP * (len(panels) - 1)) // len(panels)
    )
    drawings = []
    for each, its_look, caption, over in panels:
        drawing = draw_heatmap(
            each.values,
            its_look,
            picture=picture if over else None,
            region=region,
            caption=caption,
            scale=scale,
            max_width=share,
            evidence=1.0 if each.evidence is None else each.evidence,
        )
        if len(panels) > 1 and drawing.width > share:  # with its caption
            drawing = drawing.resize((share, max(1, round(drawing.height * share / drawing.width))))
        drawings.append(drawing)
    if len(drawings) == 1:
        return drawings[0]
    width = sum(each.width + _ROW_GAP for each in drawings) - _ROW_GAP
    row = Image.new("RGB", (width, max(each.height for each in drawings)), "white")
    left = 0
    for drawing in drawings:
        row.paste(drawing, (left, 0))
        left += drawing.width + _ROW_GAP
    return row


class ContactSheet:
    """A grid of small pictures with captions, which holds none of the pictures themselves.

    Its memory is bounded, however many there are.

    Args:
        count: how many pictures it has room for.
        shape: (width, height) that a picture has; others are fitted into cells of this shape.

    Attributes:
        image: the sheet with the pictures added so far.
    """

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        width, height = shape
        self._columns = min(count, max(1, round(math.sqrt(count * height / width))))
        rows = math.ceil(count / self._columns)
        # A quarter of the height at most is the caption.
        room = (
            (_MAX_SHEET / self._columns - _GAP) / width,
            (_MAX_SHEET / rows - _GAP) / height / 1.25,
        )
        scale = min(_MAX_CELL / height, *room)
        self._cell = max(1, int(width * scale)), max(1, int(height * scale))
        text = min(13, max(1, self._cell[1] // 10))
        self._font, self._line = ImageFont.load_default(text), round(text * 1.25)
        self._step = self._cell[0] + _GAP, self._cell[1] + 2 * self._line + _GAP
        self._filled = 0
        self.image = Image.new(
            "RGB", (self._columns * self._step[0] + _GAP, rows * self._step[1] + _GAP), "white"
        )

    def add(self, picture: Image.Image, *lines: str) -> None:
        """Add a picture in the next cell, with at most two lines below it, each cut to the cell's
        width.
        """
        row, column = divmod(self._filled, self._columns)
        left, top = _GAP + column * self._step[0], _GAP + row * self._step[1]
        self.image.paste(
            ImageOps.pad(picture.convert("RGB"), self._cell, color="white"), (left, top)
        )
        pen = ImageDraw.Draw(self.image)
        for number, line in enumerate(lines[:2]):
            place = left, top + self._cell[1] + number * self._line
            pen.text(place, fit_text(line, self._font, self._cell[0]), "black", self._font)
        self._filled += 1
