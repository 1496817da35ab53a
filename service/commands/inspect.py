"""`vitserve inspect CHECKPOINT`: what was understood of a checkpoint, without serving it."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(commands: Any) -> None:
    """Flags of `vitserve inspect`."""
    parser = commands.add_parser("inspect", help="print what a checkpoint is")
    parser.add_argument("checkpoint", nargs="?", default="bundled", help="`bundled` (default), or a folder")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoint as the service does, weights and all, and print it.

    Raises:
        CheckpointError: it cannot be read exactly.
    """
    from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import
    from model.vit import count_parameters  # noqa: PLC0415

    checkpoint = load_checkpoint(arguments.checkpoint)
    config, preprocess = checkpoint.config, checkpoint.preprocess
    parameters = count_parameters(checkpoint.build())
    labels = ", ".join(checkpoint.labels[:3]) + (", ..." if len(checkpoint.labels) > 3 else "")
    rows = {
        "name": checkpoint.name,
        "source": f"{checkpoint.source} ({checkpoint.format})",
        "architecture": checkpoint.architecture,
        "input": f"{_by(config.image_size)} px, {config.in_channels} channel(s)",
        "patches": f"{config.patch_size} px, {_by(config.grid)} of them, {config.prefix_tokens} token(s) before",
        "network": f"{config.depth} layers, width {config.width}, {config.heads} heads, MLP {config.mlp_width}",
        "pooling": f"{config.pool} (attention maps show: {config.attention_source})",
        "parameters": f"{parameters:,} ({4 * parameters / 2**20:.1f} MiB in float32, half of it in bfloat16)",
        "preprocessing": f"{preprocess.resize} to {_by(preprocess.resize_size)}, {preprocess.interpolation}, "
        f"centre crop {_by(preprocess.size)}",
        "mean, std": f"{_list(preprocess.mean)}, {_list(preprocess.std)}",
        "classes": f"{config.num_classes}: {labels}",
        "scores": f"{'sigmoid' if checkpoint.multi_label else 'softmax'}, temperature {checkpoint.temperature:g}",
    }
    for name, value in rows.items():
        print(f"{name:14} {value}")  # noqa: T201
    return 0


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def _list(values: tuple[float, ...]) -> str:
    return "[" + ", ".join(f"{value:g}" for value in values) + "]"
