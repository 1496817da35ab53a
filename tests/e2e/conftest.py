"""A tiny checkpoint, pictures with known scores, and real server processes to ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.network.vit import VisionTransformer
from model.runtime.predictor import Predictor
from tests.e2e.serving import CHECKPOINT_NAME, LABELS, SIZE, Pictures, Serve, Served


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native folder: two layers, random weights that are always the same."""
    config = ViTConfig(
        image_size=(SIZE, SIZE),
        patch_size=4,
        width=32,
        depth=2,
        heads=2,
        mlp_width=64,
        num_classes=len(LABELS),
    )
    model = VisionTransformer(config)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        # Spreads that make the scores of different pictures differ.
        std = 2.0 if ".attn.proj." in name else {"cls_token": 0.02, "pos_embed": 0.1, "head.weight": 0.3}.get(name, 0.4)
        torch.nn.init.normal_(parameter, std=std, generator=generator)
        if "norm" in name and name.endswith("weight"):
            torch.nn.init.ones_(parameter)
    preprocess = PreprocessConfig(
        size=(SIZE, SIZE),
        resize="shortest_edge",
        resize_size=(SIZE, SIZE),
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
    )
    folder = tmp_path_factory.mktemp("checkpoint")
    native.write(
        folder,
        Checkpoint(
            name=CHECKPOINT_NAME,
            source="made here",
            format=native.FORMAT,
            architecture="",
            config=config,
            preprocess=preprocess,
            labels=LABELS,
            tensors=model.state_dict(),
        ),
        dtype=torch.float32,
    )
    return folder


@pytest.fixture(scope="session")
def pictures(checkpoint: Path) -> Pictures:
    """Noise of many sizes, each picture with the scores that the model gives it alone."""
    predictor = Predictor(load_checkpoint(str(checkpoint)), device="cpu", backend="torch", dtype="float32", threads=1)
    return Pictures.make(predictor, count=64)


def _serve(folder: Path, checkpoint: Path) -> Iterator[Serve]:
    started: list[Served] = []

    def serve(**settings: object) -> Served:
        defaults: dict[str, Any] = {"checkpoint": checkpoint, "device": "cpu", "dtype": "float32", "threads": 1}
        defaults |= {"request_timeout": 60}  # so that a busy machine refuses nothing that a test wants answered
        server = Served(folder / f"server-{len(started)}.log", **(defaults | settings))
        started.append(server)
        return server

    yield serve
    for server in started:
        server.kill()


@pytest.fixture(scope="module")
def serve_module(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Serve]:
    """Starts servers that live as long as the module's tests."""
    yield from _serve(tmp_path_factory.mktemp("servers"), checkpoint)


@pytest.fixture
def serve(tmp_path: Path, checkpoint: Path) -> Iterator[Serve]:
    """Starts servers of one test; settings as keywords."""
    yield from _serve(tmp_path, checkpoint)
