"""Folders of pictures whose class is their colour."""

from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = {"blue": (40, 60, 200), "green": (50, 190, 70), "red": (210, 50, 40)}


def write_class(
    folder: Path, colour: str, count: int, *, seed: int = 0, suffix: str = ".png"
) -> list[Path]:
    """Write `count` noisy pictures of one colour, of many sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, *colour.encode()])
    paths = []
    for number in range(count):
        shape = (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3)
        pixels = np.clip(np.array(COLOURS[colour]) + rng.normal(0, 30, shape), 0, 255).astype(
            np.uint8
        )
        paths.append(folder / f"{number:03}{suffix}")
        Image.fromarray(pixels).save(paths[-1])
    return paths


def write_folder(root: Path, count: int, *, seed: int = 0) -> Path:
    """Write `root/blue/000.png` and so on, `count` pictures per class."""
    for colour in COLOURS:
        write_class(root / colour, colour, count, seed=seed)
    return root
