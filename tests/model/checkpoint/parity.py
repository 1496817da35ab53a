"""Helpers of parity tests: random weights for all parts, preprocessing, and a measure of error."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model.checkpoint import Checkpoint
from model.network.vit import VisionTransformer
from model.outputs import POOLINGS, embedding_width

TOLERANCE = 1e-4
EXACT = 1e-5


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Set random values in all parameters.

    Libraries start some at zero or one, which would hide mistakes.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                one = 1.0 if name.endswith("weight") or "gamma" in name or "lambda" in name else 0.0
                parameter.copy_(one + 0.3 * noise)
            elif parameter.ndim == 2 and min(parameter.shape) > 2:
                parameter.copy_(noise * 1.2 / parameter.shape[1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise)


def pictures(checkpoint: Checkpoint, count: int = 3) -> Tensor:
    """Return random normalised pixels [count, C, H, W], float32, of the checkpoint's input size."""
    config = checkpoint.config
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, config.in_channels, *config.image_size, generator=generator)


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value."""
    assert got.shape == expected.shape
    return float((got - expected).abs().max() / expected.abs().max())


_last: list[tuple[Checkpoint, VisionTransformer]] = []


def built(checkpoint: Checkpoint) -> VisionTransformer:
    """Return the checkpoint's network, which comparisons of one checkpoint share."""
    if not _last or _last[0][0] is not checkpoint:
        _last[:] = [(checkpoint, checkpoint.build())]
    return _last[0][1]


def assert_same_logits(checkpoint: Checkpoint, reference: Any, what: str) -> Tensor:
    """Compare logits with a reference's on random pixels; returns the pixels.

    Args:
        reference: [B, C, H, W] -> logits [B, K].
    """
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = reference(pixels)
        got = built(checkpoint)(pixels).logits
    assert expected.std() > 1e-2, "the reference says nothing"
    error = relative_error(got, expected)
    print(f"parity {what}: {error:.1e}")  # noqa: T201 - read with pytest -s for the table in the documentation
    assert error < TOLERANCE, what
    return pixels


def assert_same_embeddings(
    checkpoint: Checkpoint, pixels: Tensor, expected: dict[str, Tensor]
) -> None:
    """Compare embeddings per pooling, of a full pass and of a pass that skips tokens."""
    network = built(checkpoint)
    config = checkpoint.vit
    with torch.inference_mode():
        whole = network(pixels, (), 0, True)
        spared = network(pixels)
    for name, values in spared.embeddings.items():
        assert relative_error(values, whole.embeddings[name]) < EXACT
    assert relative_error(spared.logits, whole.logits) < EXACT
    for pool in POOLINGS:
        if pool in expected:
            found = whole.embeddings[pool]
            assert found.shape == (len(pixels), embedding_width(config, pool))
            assert relative_error(found, expected[pool]) < EXACT, pool


def assert_same_rows(checkpoint: Checkpoint, pixels: Tensor, whole: Tensor) -> None:
    """Compare attention rows of all layers with whole matrices [B, layers, heads, N, N]."""
    config = checkpoint.vit
    with torch.inference_mode():
        rows = built(checkpoint)(pixels, tuple(range(config.depth))).attention
    assert rows is not None
    is_cls = config.attention_source == "cls"
    expected = whole[:, :, :, 0] if is_cls else whole[:, :, :, config.prefix_tokens :].mean(dim=3)
    last = (
        config.depth - 1 if config.attention_source == "pool_query" else config.depth
    )  # the pooling's query
    torch.testing.assert_close(rows[:, :last], expected[:, :last], atol=1e-5, rtol=0)


def preprocess_file(folder: Path, rows: int, columns: int, channels: int = 3) -> str:
    """Write a squashing preprocessing to a folder and return its path."""
    path = folder / "preprocess.json"
    fields = {
        "size": [rows, columns],
        "resize": "squash",
        "resize_size": [rows, columns],
        "interpolation": "bilinear",
        "mean": [0.5] * channels,
        "std": [0.5] * channels,
    }
    path.write_text(json.dumps(fields))
    return str(path)
