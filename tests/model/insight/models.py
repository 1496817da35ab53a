"""A small random model that the tests of the analyses share."""

from __future__ import annotations

import torch

from model.config import ViTConfig
from model.network.vit import VisionTransformer


def random_model(seed: int = 0, **changes: object) -> VisionTransformer:
    """Return a model with weights so large that attention is far from even, and a grid that is not square."""
    values: dict[str, object] = {
        "image_size": (24, 40),
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp_width": 32,
        "num_classes": 3,
    }
    model = VisionTransformer(ViTConfig.model_validate(values | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0, generator=generator)
    return model
