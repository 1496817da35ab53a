"""The layout of a state dict's tensors, once their names are the model's: what other code counts or keeps otherwise."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from model.checkpoint.tensors import TensorSource
from model.config import ViTConfig
from model.errors import CheckpointError
from model.network.vit import meta_model


def names_a_fused_projection(stored: Mapping[str, Tensor], renamed: Mapping[str, Tensor]) -> bool:
    """Return whether a map names a tensor of queries, keys and values as timm does, which tells no order of rows."""
    places = {tensor.data_ptr() for name, tensor in stored.items() if name not in renamed}
    return any(name not in stored and ".qkv." in name and t.data_ptr() in places for name, t in renamed.items())


def with_registers(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors of a DINOv2 model with registers as timm has them.

    DINOv2 gives registers no position; timm's model has none for CLS either, so it is added to its token here.
    """
    names = ("register_tokens", "cls_token", "pos_embed")
    stored = TensorSource({name: tensors[name] for name in names if name in tensors}, where)
    registers, cls, position = (stored.shape(name) for name in names)
    if len(registers) != 3 or len(cls) != 3 or len(position) != 3 or position[1] < 2:
        raise CheckpointError(f"{where}: pos_embed has shape {list(position)}: expected [1, tokens, width]")
    table = stored.take("pos_embed", 1, position[1], cls[2])
    return {name: tensor for name, tensor in tensors.items() if name not in names} | {
        "reg_token": stored.take("register_tokens", 1, registers[1], cls[2]),
        "cls_token": stored.take("cls_token", 1, 1, cls[2]) + table[:, :1],
        "pos_embed": table[:, 1:],
    }


def with_patches(tensors: Mapping[str, Tensor], config: ViTConfig, order: str | None) -> dict[str, Tensor]:
    """Return the tensors with the embedding of patches as the model counts a patch's numbers: channels first."""
    result = dict(tensors)
    channels, edge = config.in_channels, config.patch_size
    for name in ("patch_embed.proj.weight", "patch_embed.norm_in.weight", "patch_embed.norm_in.bias"):
        flat = result.get(name)
        if flat is None or flat.ndim == 4 or config.stem is not None or flat.shape[-1] != channels * edge**2:
            continue
        if order == "channels_last":
            flat = flat.reshape(-1, edge, edge, channels).permute(0, 3, 1, 2)
        flat = flat.reshape(-1, channels, edge, edge)
        if "norm_in" in name:
            result[name] = flat.flatten()
        else:
            result[name] = flat.flatten(1) if config.patch_embedding == "linear" else flat
    return result


def in_order(tensors: dict[str, Tensor], config: ViTConfig, order: str) -> dict[str, Tensor]:
    """Return the tensors with the rows of fused projections as the model counts them: `3hd`."""
    sizes = {"3": 3, "h": config.heads, "d": config.inner_width // config.heads}
    for name, tensor in tensors.items():
        if order != "3hd" and ".attn.qkv." in name and len(tensor) == math.prod(sizes.values()):
            rows = tensor.reshape(*(sizes[letter] for letter in order), *tensor.shape[1:])
            tensors[name] = rows.movedim([order.index(letter) for letter in "3hd"], [0, 1, 2]).flatten(0, 2)
    return tensors


def completed(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Return the tensors with those that are stated not to be in the file, and the last norm where it is stated."""
    if config.position_embedding == "sincos2d":
        tensors["pos_embed"] = meta_model(config).fixed_position_embedding()
    if config.projection_bias and not any(name.endswith(".attn.proj.bias") for name in tensors):
        tensors |= {f"blocks.{i}.attn.proj.bias": torch.zeros(config.width) for i in range(config.depth)}
    if config.norm_after_pool and "fc_norm.weight" not in tensors:
        return {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()}
    return tensors


def edge_of_flat(inputs: int, where: str) -> tuple[int, int]:
    """Return channels and edge of patches that a linear layer reads."""
    for channels in (1, 3):
        edge = math.isqrt(inputs // channels)
        if channels * edge * edge == inputs and edge:
            return channels, edge
    raise CheckpointError(f"{where}: patches of {inputs} numbers are no square ones of 1 or 3 channels")
