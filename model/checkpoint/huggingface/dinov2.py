"""Dinov2ForImageClassification, with and without registers (transformers/models/dinov2*/modeling_*.py).

The classes take any input size and resize their positions to it at each forward pass, the released
ones always (trained at 518 px, preprocessed to 224 px); here it is done once, while reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import torch
from pydantic import Field
from torch import Tensor

from model.checkpoint.checkpoint import resized_config
from model.checkpoint.files import TensorSource
from model.checkpoint.huggingface.family import (
    BlockNames,
    Converted,
    Family,
    VisionConfig,
    take_blocks,
    take_linear,
    take_norm,
    take_patches,
)
from model.config import Size, ViTConfig
from model.errors import CheckpointError
from model.network.vit import resize_position_embedding


class _Config(VisionConfig):
    mlp_ratio: Annotated[float, Field(gt=0, le=64)]
    use_swiglu_ffn: bool


class _RegistersConfig(_Config):
    num_register_tokens: Annotated[int, Field(ge=0, le=1024)]


def _architecture(config: _Config, classes: int, registers: int) -> ViTConfig:
    hidden = int(config.hidden_size * config.mlp_ratio)
    swiglu: dict[str, Any] = {"mlp": "swiglu", "activation": "silu"} if config.use_swiglu_ffn else {}
    return config.vit_config(
        # SwiGLU keeps the parameter count: two thirds, rounded up to a multiple of 8.
        mlp_width=(int(hidden * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else hidden,
        num_classes=classes,
        registers=registers,
        position_prefix=False,
        layer_scale=True,
        pool="cls_mean",
        **swiglu,
    )


def _plain(json: dict[str, Any], classes: int) -> ViTConfig:
    return _architecture(_Config.model_validate(json), classes, 0)


def _registers(json: dict[str, Any], classes: int) -> ViTConfig:
    config = _RegistersConfig.model_validate(json)
    return _architecture(config, classes, config.num_register_tokens)


def _convert(model: str, antialias: bool, stored: TensorSource, config: ViTConfig, size: Size) -> Converted:
    width = config.width
    names = BlockNames(
        prefix=f"{model}.encoder.layer.{{}}.",
        query="attention.attention.query",
        key="attention.attention.key",
        value="attention.attention.value",
        output="attention.output.dense",
        norm1="norm1",
        norm2="norm2",
        fc1="mlp.fc1",
        fc2="mlp.fc2",
        scale1="layer_scale1.lambda1",
        scale2="layer_scale2.lambda1",
    )
    tensors = take_patches(stored, f"{model}.embeddings.patch_embeddings.projection", config)
    position = stored.take(f"{model}.embeddings.position_embeddings", 1, math.prod(config.grid) + 1, width)
    # CLS has an entry of its own and registers have none: it is added to the token once and for all.
    tensors["cls_token"] = stored.take(f"{model}.embeddings.cls_token", 1, 1, width) + position[:, :1]
    if f"{model}.embeddings.register_tokens" in stored:
        registers = stored.take(f"{model}.embeddings.register_tokens", 1, config.registers, width)
        if config.registers:
            tensors["reg_token"] = registers
    tensors |= take_blocks(stored, names, config, mlp=config.mlp == "plain")
    if config.mlp == "swiglu":
        for index in range(config.depth):
            block, to = names.prefix.format(index) + "mlp.", f"blocks.{index}.mlp."
            tensors |= take_linear(stored, f"{block}weights_in", f"{to}fc1", 2 * config.mlp_width, width)
            tensors |= take_linear(stored, f"{block}weights_out", f"{to}fc2", width, config.mlp_width)
    tensors |= take_norm(stored, f"{model}.layernorm", "norm", width)
    tensors |= take_linear(stored, "classifier", "head", config.num_classes, 2 * width)

    edge = math.isqrt(math.prod(config.grid))
    if edge * edge != math.prod(config.grid):
        raise CheckpointError(
            f"{stored.where}: {math.prod(config.grid)} positions are not a square, as its class needs"
        )
    resized = resized_config(config, size, stored.where)
    tensors["pos_embed"] = resize_position_embedding(
        position[:, 1:], prefix_tokens=0, old_grid=(edge, edge), new_grid=resized.grid, antialias=antialias
    )
    return resized, tensors


def _hub_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """From transformers 5's names in memory to those of the hub."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for old, new in (
            (".attention.q_proj.", ".attention.attention.query."),
            (".attention.k_proj.", ".attention.attention.key."),
            (".attention.v_proj.", ".attention.attention.value."),
            (".attention.o_proj.", ".attention.output.dense."),
            (".mlp.down_proj.", ".mlp.weights_out."),
        ):
            name = name.replace(old, new)  # noqa: PLW2901
        renamed[name] = tensor
    for name in [n for n in renamed if ".mlp.gate_proj." in n]:
        other = name.replace("gate_proj", "up_proj")
        if other in renamed and renamed[other].shape == renamed[name].shape:
            renamed[name.replace("gate_proj", "weights_in")] = torch.cat((renamed.pop(name), renamed.pop(other)))
    return renamed


FAMILY: Final = Family(
    class_name="Dinov2ForImageClassification",
    model_type="dinov2",
    classifier="classifier.weight",
    config=_plain,
    convert=lambda stored, config, size: _convert("dinov2", False, stored, config, size),
    # For masked image modelling.
    unused=lambda name: name == "dinov2.embeddings.mask_token",
    image_processor="BitImageProcessor",
    hub_names=_hub_names,
    resizes=True,
)

WITH_REGISTERS: Final = replace(
    FAMILY,
    class_name="Dinov2WithRegistersForImageClassification",
    model_type="dinov2_with_registers",
    config=_registers,
    convert=lambda stored, config, size: _convert("dinov2_with_registers", True, stored, config, size),
    unused=lambda name: name == "dinov2_with_registers.embeddings.mask_token",
    antialias=True,
)
