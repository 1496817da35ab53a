"""Tiny checkpoints with random weights."""

from pathlib import Path

import torch

from model.checkpoint import native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer


def write_checkpoint(
    folder: Path,
    name: str,
    size: tuple[int, int],
    labels: tuple[str, ...],
    seed: int,
    *,
    patch_size: int = 4,
) -> Path:
    """Write and return a native folder: two layers, and random weights from a fixed seed."""
    config = ViTConfig(
        image_size=size,
        patch_size=patch_size,
        width=32,
        depth=2,
        heads=2,
        mlp_width=64,
        num_classes=len(labels),
    )
    model = VisionTransformer(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        # Large enough that different pictures have different scores.
        special = {"cls_token": 0.02, "pos_embed": 0.1, "head.weight": 0.3}
        std = 2.0 if ".attn.proj." in parameter_name else special.get(parameter_name, 0.4)
        torch.nn.init.normal_(parameter, std=std, generator=generator)
        if "norm" in parameter_name and parameter_name.endswith("weight"):
            torch.nn.init.ones_(parameter)
    preprocess = PreprocessConfig(
        size=size,
        resize="shortest_edge",
        resize_size=size,
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )
    native.write(
        folder,
        Checkpoint(
            name=name,
            source="made here",
            format=native.FORMAT,
            architecture="",
            config=config,
            preprocess=preprocess,
            labels=labels,
            tensors=model.state_dict(),
        ),
        dtype=torch.float32,
    )
    return folder
