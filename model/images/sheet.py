"""Several drawings in one picture: in a row, or as a contact sheet with captions. PIL, never torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from PIL import Image, ImageDraw, ImageFont

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
    room = None if max_width is None else (max_width - _ROW_GAP * (count - 1)) // count
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
            pen.text(place, self._fitted(line), "black", self._font)
        self._filled += 1

    def _fitted(self, line: str) -> str:
        line = " ".join(line.split())
        if self._font.getlength(line) <= self._cell[0]:
            return line
        while line and self._font.getlength(line + "...") > self._cell[0]:
            line = line[:-1]
        return line + "..."
