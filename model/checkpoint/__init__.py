"""Checkpoints: one reader a format, each strict, all giving the same `Checkpoint`.

To add a format, write a module with `FORMAT`, `recognises(config)` and `read(folder, config, source)`
and name it in `READERS`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from model.checkpoint import native, timm
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.files import CONFIG_FILE, read_json
from model.config import Size
from model.errors import CheckpointError

BUNDLED: Final = Path(__file__).resolve().parent.parent / "weights" / "cifar10"
"""The checkpoint that travels with the code."""

READERS: Final = (native, timm)

__all__ = ["BUNDLED", "READERS", "Checkpoint", "load_checkpoint"]


def load_checkpoint(source: str, *, image_size: Size | None = None) -> Checkpoint:
    """Read a checkpoint, whatever its format.

    Args:
        source: `bundled`, or a folder.
        image_size: (rows, columns) in pixels to run at instead of the checkpoint's own.

    Returns:
        A checkpoint whose parts agree; its tensors are checked when it is built.

    Raises:
        CheckpointError: nothing there, no format recognised, or not exactly what the format demands.
    """
    folder = BUNDLED if source == "bundled" else Path(source).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    config = read_json(folder / CONFIG_FILE)
    for reader in READERS:
        if reader.recognises(config):
            checkpoint: Checkpoint = reader.read(folder, config, source)
            return checkpoint if image_size is None else checkpoint.resized(image_size)
    raise CheckpointError(
        f"{folder / CONFIG_FILE}: not a format this version reads ({', '.join(r.FORMAT for r in READERS)})"
    )
