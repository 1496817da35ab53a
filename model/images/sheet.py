"""Several drawings in one picture: maps in a row, or a contact sheet with captions. PIL, never torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Unpack

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from model.images.heatmap import MAX_SIZE, Look, draw_heatmap, full_scale
from model.images.legend import caption_of, fit_text
from model.images.region import Region
from model.outputs import AttentionMap

_ROW_GAP: Final = 4
"""White pixels between two pictures of a row."""

_GAP: Final = 8
"""Pixels between two pictures of a sheet."""

_MAX_CELL: Final = 320
"""Pixels of a cell's longer side on a sheet of few pictures."""

_MAX_SHEET: Final = 8192
"""Pixels that a sheet has at most along each side: with many pictures, the cells get smaller."""


def in_a_row(
    pictures: Iterable[Image.Image],
    count: int,
    *,
    max_width: int | None = None,
) -> Image.Image:
    """Return RGB pictures side by side, their upper edges level, on white; a single picture as it is.

    Args:
        count: how many there are. They are taken in turn, and each is made small before the next, so that pictures
            that are drawn as they are taken are never in memory whole together.
        max_width: pixels of the row at most: each picture that has more than its share of them is made smaller.
    """
    room = None if max_width is None else _panel_width(count, max_width)
    fitted = []
    for picture in pictures:
        if count > 1 and room is not None and picture.width > room:
            size = room, max(1, round(picture.height * room / picture.width))
            fitted.append(picture.resize(size, Image.Resampling.LANCZOS))
        else:
            fitted.append(picture)
    if count == 1:
        return fitted[0]
    width = sum(picture.width + _ROW_GAP for picture in fitted) - _ROW_GAP
    row = Image.new("RGB", (width, max(picture.height for picture in fitted)), "white")
    left = 0
    for picture in fitted:
        row.paste(picture, (left, 0))
        left += picture.width + _ROW_GAP
    return row


def draw_maps(
    maps: Sequence[AttentionMap],
    labels: Sequence[str] | None,
    *,
    picture: NDArray[np.uint8],
    region: Region | None = None,
    overlay: bool = True,
    name: str | None = None,
    max_width: int | None = None,
    **look: Unpack[Look],
) -> Image.Image:
    """Return maps of a picture side by side, their colours on one scale.

    Args:
        labels: of the model, for captions; None: without.
        picture, region: see `draw_heatmap`.
        overlay: whether the maps are drawn over the picture.
        name: of the picture, which then stands without a map before the others.
        max_width: see `in_a_row`.
    """
    count = len(maps) + (name is not None)
    room = MAX_SIZE if max_width is None else _panel_width(count, max_width)
    surest = max(maps, key=lambda each: each.evidence or 0)
    scale = max(full_scale(surest.values, surest.evidence), *(full_scale(each.values) for each in maps))

    def panels() -> Iterator[Image.Image]:
        if name is not None:
            lines = () if labels is None else (name,)
            plain: Look = {"alpha": 0.0, "size": look.get("size")}
            yield draw_heatmap(maps[0].values, picture=picture, region=region, caption=lines, max_width=room, **plain)
        for each in maps:
            yield draw_heatmap(
                each.values,
                picture=picture if overlay else None,
                region=region,
                caption=() if labels is None else caption_of(each, labels),
                scale=scale,
                max_width=room,
                **look,
            )

    return in_a_row(panels(), count, max_width=max_width)


def _panel_width(count: int, max_width: int) -> int:
    return (max_width - _ROW_GAP * (count - 1)) // count


class ContactSheet:
    """A grid of small pictures with captions, which holds none of the pictures themselves.

    Its memory is bounded, however many there are.

    Args:
        count: how many pictures it has room for.
        shape: (width, height) that a picture has; others are fitted into cells of this shape.
    """

    def __init__(self, count: int, shape: tuple[int, int]) -> None:
        width, height = shape
        self._columns = min(count, max(1, round(math.sqrt(count * height / width))))
        rows = math.ceil(count / self._columns)
        scale = min(
            _MAX_CELL / max(width, height) * max(1.0, width / height),  # a row of panels gets more than a picture
            (_MAX_SHEET / self._columns - _GAP) / width,
            (_MAX_SHEET / rows - _GAP) / height / 1.25,  # a quarter of the height at most is the caption
        )
        self._cell = max(1, int(width * scale)), max(1, int(height * scale))
        text = min(13, max(1, self._cell[1] // 10))
        self._font = ImageFont.load_default(text)
        self._line = round(text * 1.25)
        self._count, self._filled = count, 0
        self._step = self._cell[0] + _GAP, self._cell[1] + 2 * self._line + _GAP
        size = self._columns * self._step[0] + _GAP, rows * self._step[1] + _GAP
        self._canvas = Image.new("RGB", size, "white")

    @property
    def image(self) -> Image.Image:
        """Return the sheet with the pictures added so far."""
        return self._canvas

    def add(self, picture: Image.Image, *lines: str) -> None:
        """Add a picture in the next cell, with at most two lines below it, each cut to the cell's width.

        Raises:
            ValueError: there is no room for another.
        """
        if self._filled == self._count:
            raise ValueError(f"the sheet is full: it has room for {self._count}")
        row, column = divmod(self._filled, self._columns)
        left, top = _GAP + column * self._step[0], _GAP + row * self._step[1]
        factor = min(self._cell[0] / picture.width, self._cell[1] / picture.height)
        size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
        small = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        inset = (self._cell[0] - size[0]) // 2, (self._cell[1] - size[1]) // 2
        self._canvas.paste(small, (left + inset[0], top + inset[1]))
        pen = ImageDraw.Draw(self._canvas)
        for number, line in enumerate(lines[:2]):
            place = left, top + self._cell[1] + number * self._line
            pen.text(place, fit_text(line, self._font, self._cell[0]), "black", self._font)
        self._filled += 1
