"""Views of a photograph as a model sees them: squares of it, some of them mirrored. They stand for more photographs."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from model.config import PreprocessConfig
from model.images.preprocess import preprocess


def square_view(
    photograph: Image.Image, random: np.random.Generator, config: PreprocessConfig, *, smallest: float, mirrored: bool
) -> NDArray[np.uint8]:
    """Return a square of a photograph, uint8 [H, W, C] of the model's input size.

    Args:
        photograph: in RGB.
        smallest: share of its shorter side that the square's side has at least. Details alone are of no class, and
            which one is named is chance.
    """
    side = int(random.uniform(smallest, 1) * min(photograph.size))
    left, upper = (int(random.integers(0, size - side + 1)) for size in photograph.size)
    view = photograph.crop((left, upper, left + side, upper + side))
    if mirrored:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    file = io.BytesIO()
    view.save(file, "BMP")
    return preprocess(file.getvalue(), config)
