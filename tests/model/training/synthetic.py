"""Pictures that a tiny model can learn to tell apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_batch(path: Path, count: int, seed: int) -> None:
    """Pictures whose label can be learned: each class has its own colour, under noise."""
    colours = np.random.default_rng(0).integers(40, 216, (10, 3))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    planes = np.repeat(colours[labels], 32 * 32, axis=1)
    pixels = np.clip(planes + rng.normal(0, 12, planes.shape), 0, 255)
    np.concatenate([labels[:, None], pixels], axis=1).astype(np.uint8).tofile(path)
