"""Pictures that a tiny model can learn to tell apart."""

from functools import cache
from pathlib import Path

import numpy as np

from model.extensions.evaluation.cifar10 import TEST_FILES, TRAIN_FILES

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_batch(path: Path, count: int, seed: int) -> None:
    """Return pictures with learnable labels: each class has its own colour, with noise."""
    path.write_bytes(_batch(count, seed))


def write_cifar(folder: Path) -> Path:
    """Write 400 training and 100 test pictures in the binary layout, and return the folder."""
    folder.mkdir()
    for seed, name in enumerate(TRAIN_FILES + TEST_FILES):
        write_batch(folder / name, 100 if name in TEST_FILES else 80, seed)
    (folder / "batches.meta.txt").write_text("\n".join(LABELS) + "\n\n")
    return folder


@cache
def _batch(count: int, seed: int) -> bytes:
    colours = np.random.default_rng(0).integers(40, 216, (10, 3))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    planes = np.repeat(colours[labels], 32 * 32, axis=1)
    pixels = np.clip(planes + rng.normal(0, 12, planes.shape), 0, 255)
    return np.concatenate([labels[:, None], pixels], axis=1).astype(np.uint8).tobytes()
