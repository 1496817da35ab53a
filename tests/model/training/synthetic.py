"""Pictures that a tiny model can learn to tell apart, and such a model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model.checkpoint import Checkpoint, native
from model.config import PreprocessConfig, ViTConfig
from model.data.cifar10 import TEST_FILES, TRAIN_FILES
from tests.model.blocks import drawn_model

LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def write_batch(path: Path, count: int, seed: int) -> None:
    """Pictures whose label can be learned: each class has its own colour, under noise."""
    path.write_bytes(_batch(count, seed))


def write_cifar(folder: Path) -> Path:
    """Write 400 training and 100 test pictures in the binary layout, and return the folder."""
    folder.mkdir()
    for seed, name in enumerate(TRAIN_FILES + TEST_FILES):
        write_batch(folder / name, 100 if name in TEST_FILES else 80, seed)
    (folder / "batches.meta.txt").write_text("\n".join(LABELS) + "\n\n")
    return folder


MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def write_start(folder: Path, **fields: Any) -> Path:
    """Write two layers and seven classes, by default at 16 pixels, with weights that are always the same."""
    sizes = {"image_size": (16, 16), "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "mlp_width": 64}
    config = ViTConfig.model_validate(sizes | {"num_classes": 7} | fields)
    tensors = drawn_model(config).state_dict()
    tensors |= {name: torch.full_like(tensor, 0.5) for name, tensor in tensors.items() if name.startswith("head")}
    preprocess = PreprocessConfig(
        size=config.image_size,
        resize="squash",
        resize_size=config.image_size,
        interpolation="bilinear",
        mean=MEAN[: config.in_channels],
        std=STD[: config.in_channels],
    )
    start = Checkpoint("start", "made", native.FORMAT, "vit", config, preprocess, tuple("abcdefg"), tensors)
    native.write(folder, replace(start, temperature=3.0, multi_label=True))
    return folder


@cache
def _batch(count: int, seed: int) -> bytes:
    colours = np.random.default_rng(0).integers(40, 216, (10, 3))
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    planes = np.repeat(colours[labels], 32 * 32, axis=1)
    pixels = np.clip(planes + rng.normal(0, 12, planes.shape), 0, 255)
    return np.concatenate([labels[:, None], pixels], axis=1).astype(np.uint8).tobytes()
