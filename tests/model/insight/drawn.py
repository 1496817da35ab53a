"""Drawn figures as pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def read(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


def near(picture: NDArray[np.uint8], colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    close: NDArray[np.bool_] = np.all(np.abs(picture.astype(int) - colour) < 40, axis=-1)
    return close
