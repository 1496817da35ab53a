"""What the names in a plain state dict look like, for a refusal where they are not those of a ViT that is read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.errors import CheckpointError

_TRANSFORMERS: Final = ("vit.", "deit.", "dinov2", "beit.", "vision_model.")
_EXPECTED: Final = "timm's names (cls_token, patch_embed.proj.weight, blocks.0.norm1.weight, …)"
_FIRST_BLOCK: Final = re.compile(r"((?:\w+\.)*?)blocks\.0\.")
_SHOWN: Final = 4


def check_names(tensors: Mapping[str, Tensor], where: str) -> None:
    """Refuse a state dict whose names cannot be those of a ViT's patches, blocks and head.

    Raises:
        CheckpointError: it says what the names look like instead.
    """
    if any(name.startswith(_TRANSFORMERS) for name in tensors):
        raise CheckpointError(f"{where}: transformers' names: give its folder, with config.json, instead")
    prefix = _prefix(tensors)
    if prefix is None:
        raise CheckpointError(f"{where}: {_description(tensors)}; this version reads {_EXPECTED}")
    if prefix:
        others = [name for name in tensors if not name.startswith(prefix)]
        which = (
            f"a ViT's names begin with {prefix!r:.100}, {others[0]!r:.100} does not"
            if others
            else f"all begin with {prefix!r:.100}"
        )
        raise CheckpointError(f"{where}: {which}: save the tensors under timm's names, without this prefix")
    if "head.weight" not in tensors:
        raise CheckpointError(f"{where}: missing key 'head.weight': a ViT without a classification head")


def _prefix(tensors: Mapping[str, Tensor]) -> str | None:
    """Return what stands before a ViT's own names, mostly nothing, or None where they are not a ViT's."""
    prefixes = {match[1] for name in tensors if (match := _FIRST_BLOCK.match(name))}
    return next((p for p in sorted(prefixes) if any(name.startswith(f"{p}patch_embed.") for name in tensors)), None)


def _description(tensors: Mapping[str, Tensor]) -> str:
    first = {name.partition(".")[0]: name for name in reversed(list(tensors))}
    shown = ", ".join(repr(name)[:80] for name in list(reversed(first.values()))[:_SHOWN])
    convolutions = sum(tensor.ndim == 4 for tensor in tensors.values())
    if convolutions > 1:
        return (
            f"not a Vision Transformer but a convolutional network: {convolutions} convolutions, names such as {shown}"
        )
    return f"not a Vision Transformer that is read: names such as {shown}"
