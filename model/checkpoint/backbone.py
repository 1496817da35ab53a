"""What a model is made of: its backbone, which others may have as well, and its head, a value of a few kilobytes."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.tensors import digest_of
from model.config import LibraryConfig, ViTConfig
from model.heads import Head
from model.network.library import linear_head


def backbone_and_head(checkpoint: Checkpoint) -> tuple[str, Head | None]:
    """Return a name of the backbone, the same for equal ones, and the head with its weights, None without one.

    Equal are all tensors but the head's, the architecture with its input size, and the mean and deviation of pixels,
    which the network's graph divides by. A head that is no linear layer on the features of an image, as two heads of
    a distilled model, is a part of its backbone; so is a text tower.
    """
    tensors, config, layer = dict(checkpoint.tensors), checkpoint.config, _head_of(checkpoint)
    weight, head = tensors.pop(f"{layer}.weight", None), None
    if weight is not None:
        values = weight.float().numpy(), tensors.pop(f"{layer}.bias").float().numpy()
        head = replace(checkpoint.head, weight=values[0].copy(), bias=values[1].copy())
    if layer is not None:
        config = config.model_copy(update={"num_classes": 0})
    pixels, texts = (checkpoint.preprocess.mean, checkpoint.preprocess.std), checkpoint.zero_shot and checkpoint.content
    parts = digest_of(tensors), config.model_dump_json(), pixels, texts
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16], head


def _head_of(checkpoint: Checkpoint) -> str | None:
    """Return the name of the linear layer that makes logits of the embedding `head`, or None where none does."""
    config = checkpoint.config
    if isinstance(config, ViTConfig):
        return None if config.distillation_head or config.head_width is not None else "head"
    assert isinstance(config, LibraryConfig)
    return linear_head(config)
