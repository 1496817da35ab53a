"""Rows and columns of tensors in the order in which the model counts them."""

import math
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.config import ViTConfig
from model.errors import CheckpointError

# Orders of the rows of a fused projection: 3 for queries, keys and values, h for the attention
# heads, d for the features of an attention head.
_ORDERS: Final = ("3hd", "3dh", "h3d", "hd3", "d3h", "dh3")


def flat_patch(inputs: int, where: str) -> tuple[int, int]:
    """Return the channels and the edge of patches that a linear layer reads."""
    for channels in (1, 3):
        edge = math.isqrt(inputs // channels)
        if channels * edge * edge == inputs and edge:
            return channels, edge
    raise CheckpointError(
        f"{where}: patches of {inputs} numbers are not square patches of 1 or 3 channels"
    )


def with_patches_in_order(
    tensors: Mapping[str, Tensor], config: ViTConfig, order: str | None
) -> dict[str, Tensor]:
    """Return the tensors with the numbers of a patch in the model's order: channels first.

    Args:
        order: `channels_last` or `channels_first`, the order of the file; None for the latter.
    """
    result = dict(tensors)
    if config.stem is not None:
        return result
    channels = config.in_channels
    edge = config.patch_size
    for name in (
        "patch_embed.proj.weight",
        "patch_embed.norm_in.weight",
        "patch_embed.norm_in.bias",
    ):
        flat = result.get(name)
        if flat is None or flat.ndim == 4 or flat.shape[-1] != channels * edge**2:
            continue
        if order == "channels_last":
            flat = flat.reshape(-1, edge, edge, channels).permute(0, 3, 1, 2)
        patches = flat.reshape(-1, channels, edge, edge)
        if "norm_in" in name:
            result[name] = patches.flatten()
        elif config.patch_embedding == "linear":
            result[name] = patches.flatten(1)
        else:
            result[name] = patches
    return result


def with_projections_in_order(
    tensors: Mapping[str, Tensor], config: ViTConfig, order: str
) -> dict[str, Tensor]:
    """Return the tensors with the rows of fused projections in the model's order: `3hd`."""
    if order not in _ORDERS:
        raise CheckpointError(
            f"VIT_ARCHITECTURE: qkv_order {order!r:.100}: expected one of {', '.join(_ORDERS)}"
        )
    result = dict(tensors)
    if order == "3hd":
        return result
    sizes = {"3": 3, "h": config.heads, "d": config.inner_width // config.heads}
    axes = [order.index(letter) for letter in "3hd"]
    for name, tensor in tensors.items():
        if ".attn.qkv." in name and len(tensor) == math.prod(sizes.values()):
            rows = tensor.reshape(*(sizes[letter] for letter in order), *tensor.shape[1:])
            result[name] = rows.movedim(axes, [0, 1, 2]).flatten(0, 2)
    return result
