from __future__ import annotations

import numpy as np
from PIL import Image

from model.training.loop import random_resized_crop


def test_a_resized_crop_is_a_part_of_allowed_area_and_shape() -> None:
    across, down = np.meshgrid(np.arange(60), np.arange(40))
    image = Image.fromarray(np.stack((across, down, down), axis=-1).astype(np.uint8))
    draw = np.random.default_rng(0)
    for _ in range(100):
        part = np.asarray(random_resized_crop(image, (30, 30), 0.4, draw)).astype(float)
        assert part.shape == (30, 30, 3)
        width, height = (part[..., 0].max() - part[..., 0].min()) + 2, (part[..., 1].max() - part[..., 1].min()) + 2
        assert 0.3 < width * height / 2400 <= 1.1
        assert 0.6 < width / height < 1.6
    long = Image.fromarray(np.zeros((4, 100, 3), np.uint8))
    assert random_resized_crop(long, (8, 8), 0.9, draw).size == (8, 8)
