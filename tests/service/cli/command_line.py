"""Helpers for tests of subcommands: run the command line, write a tiny checkpoint and pictures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from model.checkpoint import Checkpoint, native
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer
from service.cli.main import main

HALF = (0.5, 0.5, 0.5)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Run `vitserve` in this process; return (exit code, stdout, stderr)."""
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def write_pictures(folder: Path, *names: str) -> Path:
    """Write a picture of noise, 30 x 20 pixels, under each name below the folder; return the
    folder.
    """
    generator = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(path)
    return folder


def write_checkpoint(
    folder: Path, labels: Sequence[str], *, resize: str = "shortest_edge", **changes: Any
) -> Path:
    """Write a native folder `tiny` with weights of a fixed seed and `changes` to its config."""
    sizes = {
        "image_size": (16, 16),
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp_width": 32,
    }
    config = ViTConfig.model_validate({**sizes, "num_classes": len(labels), **changes})
    torch.manual_seed(0)
    model = VisionTransformer(config)
    for name, parameter in model.named_parameters():
        if name != "pos_embed" or config.position_embedding == "learned":
            torch.nn.init.normal_(parameter, std=0.5)
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if labels or not name.startswith("head.")
    }
    if config.position_embedding == "sincos2d":
        tensors["pos_embed"] = model.fixed_position_embedding()
    size = config.image_size
    preprocess = PreprocessConfig.model_validate(
        {
            "size": size,
            "resize": resize,
            "resize_size": size,
            "interpolation": "bicubic",
            "mean": HALF,
            "std": HALF,
        }
    )
    native.write(
        folder,
        Checkpoint(
            "tiny", "made", native.FORMAT, "vit", config, preprocess, tuple(labels), tensors
        ),
    )
    return folder
