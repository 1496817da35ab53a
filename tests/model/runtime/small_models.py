"""A small random model and images of its size."""

import numpy as np
import torch
from numpy.typing import NDArray

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer

MEAN = (0.4, 0.5, 0.6)
STD = (0.2, 0.25, 0.3)


def make_checkpoint(depth: int = 2, **changes: object) -> Checkpoint:
    config = ViTConfig(
        image_size=(16, 24),
        patch_size=8,
        width=32,
        depth=depth,
        heads=2,
        mlp_width=64,
        num_classes=5,
    )
    torch.manual_seed(0)
    model = VisionTransformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    values: dict[str, object] = {
        "name": "test",
        "source": "test",
        "format": "vitserve",
        "architecture": "vit",
        "config": config,
        "preprocess": PreprocessConfig(
            size=(16, 24),
            resize="squash",
            resize_size=(16, 24),
            interpolation="bicubic",
            mean=MEAN,
            std=STD,
        ),
        "labels": tuple("abcde"),
        "tensors": {name: tensor.detach() for name, tensor in model.state_dict().items()},
    }
    return Checkpoint(**(values | changes))  # type: ignore[arg-type]


def make_images(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (count, 16, 24, 3), dtype=np.uint8)
