"""Tensors of transformers' classes that need more than a new name, such as positions."""

import math

import torch
from torch import Tensor

from model.checkpoint.input_size import StoredNetwork, resized_network
from model.checkpoint.tensors import take_tensor
from model.config import ViTConfig
from model.errors import CheckpointError
from model.layer_config import Size
from model.network.layers.position import relative_table_size

Tensors = dict[str, Tensor]


def keep_positions(tensors: Tensors, config: ViTConfig, size: Size, where: str) -> StoredNetwork:
    """Return the architecture and its tensors without a change."""
    return StoredNetwork(config, tensors)


def place_dinov2(
    tensors: Tensors, config: ViTConfig, size: Size, where: str, *, antialias: bool = False
) -> StoredNetwork:
    """Resize the positions of DINOv2, which are a square whatever image size the config states.

    transformers resizes them at each forward pass. All released models need it: they were trained
    at 518 px, and their pictures have 224 px.
    """
    width = config.width
    patches = math.prod(config.grid)
    edge = math.isqrt(patches)
    if edge * edge != patches:
        raise CheckpointError(f"{where}: {patches} positions are not a square, as its class needs")
    positions = take_tensor(tensors, "pos_embed", (1, patches + 1, width), where)
    if not config.registers and "reg_token" in tensors:
        take_tensor(tensors, "reg_token", (1, 0, width), where)
    # Only the CLS token has a position, so it is added to the token once.
    tensors["cls_token"] = (
        take_tensor(tensors, "cls_token", (1, 1, width), where) + positions[:, :1]
    )
    tensors["pos_embed"] = positions[:, 1:]
    pixels = edge * config.patch_size
    square = config.model_copy(update={"image_size": (pixels, pixels)})
    return resized_network(tensors, square, size, where, antialias=antialias)


def place_beit(tensors: Tensors, config: ViTConfig, size: Size, where: str) -> StoredNetwork:
    """Resize positions; each block's own table gets the shared one added."""
    shape = (relative_table_size(config.grid), config.heads)
    shared = None
    if "shared.relative_position_bias_table" in tensors:
        shared = take_tensor(tensors, "shared.relative_position_bias_table", shape, where)
    for index in range(config.depth if config.relative_position_bias else 0):
        name = f"blocks.{index}.attn.relative_position_bias_table"
        if shared is None:
            tensors[name] = take_tensor(tensors, name, shape, where)
        else:
            table = (
                take_tensor(tensors, name, shape, where) if name in tensors else torch.zeros(shape)
            )
            tensors[name] = table + shared
    if config.position_embedding == "learned":
        positions = (1, config.position_tokens, config.width)
        tensors["pos_embed"] = take_tensor(tensors, "pos_embed", positions, where)
    return resized_network(tensors, config, size, where, antialias=False)


def place_tower(tensors: Tensors, config: ViTConfig, size: Size, where: str) -> StoredNetwork:
    """Reshape positions, the CLS token and the pooling of a tower of CLIP or SigLIP.

    The class has an `nn.Embedding` [tokens, D], and a vector [D].
    """
    width = config.width
    positions = take_tensor(tensors, "pos_embed", (config.position_tokens, width), where)
    tensors["pos_embed"] = positions.unsqueeze(0)
    if config.class_token:
        tensors["cls_token"] = take_tensor(tensors, "cls_token", (width,), where).reshape(1, 1, -1)
    if config.pool == "attention":
        for kind, shape in (("weight", (3 * width, width)), ("bias", (3 * width,))):
            joined = take_tensor(
                tensors, f"vision_model.head.attention.in_proj_{kind}", shape, where
            )
            tensors[f"attn_pool.q.{kind}"] = joined[:width]
            tensors[f"attn_pool.kv.{kind}"] = joined[width:]
    return StoredNetwork(config, tensors)
