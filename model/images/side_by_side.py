"""Several pictures of the same size in one."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Final

from PIL import Image

from model.images.control import UNCONTROLLED, WorkControl
from model.images.heatmap import MAX_SIZE

_GAP: Final = 4
"""White pixels between two pictures."""


def side_by_side(pictures: Sequence[bytes], *, control: WorkControl = UNCONTROLLED) -> bytes:
    """Return RGB PNGs of the same size next to each other, as one PNG.

    They are made smaller where together they would be wider than `MAX_SIZE`.

    Args:
        control: may end the work between its steps. What it raises is raised here.
    """
    drawings = [Image.open(io.BytesIO(picture)) for picture in pictures]
    width, height = drawings[0].size
    room = (MAX_SIZE - _GAP * (len(drawings) - 1)) // len(drawings)
    if width > room:
        width, height = room, max(1, round(height * room / width))
    joined = Image.new("RGB", (len(drawings) * (width + _GAP) - _GAP, height), "white")
    for place, drawing in enumerate(drawings):
        control.check()
        joined.paste(drawing.resize((width, height), Image.Resampling.LANCZOS), (place * (width + _GAP), 0))
    control.check()
    buffer = io.BytesIO()
    joined.save(buffer, "PNG", compress_level=4)
    return buffer.getvalue()
