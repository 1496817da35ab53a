"""BeitForImageClassification (transformers/models/beit/modeling_beit.py).

Positions are relative biases, a block each or shared by all, or learned, or both; the class resizes
them to the input at each forward pass, here it is done once, while reading.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, model_validator
from torch import Tensor

from model.checkpoint.checkpoint import resized_config
from model.checkpoint.files import TensorSource
from model.checkpoint.huggingface.family import (
    Converted,
    Count,
    Family,
    VisionConfig,
    encoder_names,
    rename_encoder,
    take_blocks,
    take_linear,
    take_norm,
    take_patches,
)
from model.config import Size, ViTConfig
from model.errors import CheckpointError
from model.network.layers.position import relative_table_size, resize_position_embedding, resize_relative_table

_TABLE: Final = "relative_position_bias.relative_position_bias_table"


class _Config(VisionConfig):
    intermediate_size: Count
    layer_scale_init_value: Annotated[float, Field(allow_inf_nan=False)]
    use_absolute_position_embeddings: bool
    use_relative_position_bias: bool
    use_shared_relative_position_bias: bool
    use_mean_pooling: bool

    @model_validator(mode="after")
    def _square(self) -> _Config:
        if self.image_size[0] != self.image_size[1]:
            raise ValueError("image_size: its class reads square sizes only")
        return self


def _config(json: dict[str, Any], classes: int) -> ViTConfig:
    config = _Config.model_validate(json)
    relative = config.use_relative_position_bias or config.use_shared_relative_position_bias
    return config.vit_config(
        mlp_width=config.intermediate_size,
        num_classes=classes,
        position_embedding="learned" if config.use_absolute_position_embeddings else "none",
        relative_position_bias=relative,
        layer_scale=config.layer_scale_init_value > 0,
        pool="mean" if config.use_mean_pooling else "cls",
        norm_after_pool=config.use_mean_pooling,
        qkv_bias=True,
    )


def _convert(stored: TensorSource, config: ViTConfig, size: Size) -> Converted:
    width = config.width
    names = encoder_names("beit")._replace(scale1="lambda_1", scale2="lambda_2")
    resized = resized_config(config, size, stored.where)
    tensors: dict[str, Tensor] = {"cls_token": stored.take("beit.embeddings.cls_token", 1, 1, width)}
    tensors |= take_patches(stored, "beit.embeddings.patch_embeddings.projection", config)
    if config.position_embedding == "learned":
        position = stored.take("beit.embeddings.position_embeddings", 1, config.position_tokens, width)
        tensors["pos_embed"] = resize_position_embedding(
            position, prefix_tokens=1, old_grid=config.grid, new_grid=resized.grid, antialias=False
        )
    tensors |= take_blocks(stored, names, config, key_bias=False)
    if config.relative_position_bias:
        tables = _tables(stored, config)
        for index, table in enumerate(tables):
            tensors[f"blocks.{index}.attn.relative_position_bias_table"] = resize_relative_table(
                table, config.grid, resized.grid
            )
    if config.norm_after_pool:
        tensors |= take_norm(stored, "beit.pooler.layernorm", "fc_norm", width)
    else:
        tensors |= take_norm(stored, "beit.layernorm", "norm", width)
    tensors |= take_linear(stored, "classifier", "head", config.num_classes, width)
    return resized, tensors


def _tables(stored: TensorSource, config: ViTConfig) -> list[Tensor]:
    """One table a block; a shared one counts in each."""
    shape = relative_table_size(config.grid), config.heads
    name = f"beit.encoder.{_TABLE}"
    shared = stored.take(name, *shape) if name in stored else None
    tables = []
    for index in range(config.depth):
        name = f"beit.encoder.layer.{index}.attention.attention.{_TABLE}"
        own = stored.take(name, *shape) if name in stored else None
        if own is None and shared is None:
            raise CheckpointError(f"{stored.where}: missing key {name!r}")
        # As in the class: both are added to the scores.
        tables.append(own + shared if own is not None and shared is not None else own if own is not None else shared)
    return [table for table in tables if table is not None]


def _unused(name: str) -> bool:
    """Indices that follow from the grid, the token of masked image modelling, the decoder's pyramid."""
    return name.endswith("relative_position_index") or name == "beit.embeddings.mask_token"


def _hub_names(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """From transformers 5's names in memory to those of the hub."""
    renamed = rename_encoder("beit")(tensors)
    names = {
        name: name.replace("beit.shared_position_bias.", "beit.encoder.relative_position_bias.") for name in renamed
    }
    own = re.compile(r"(beit\.encoder\.layer\.\d+\.)(relative_position_bias\.)")
    return {own.sub(r"\1attention.attention.\2", names[name]): tensor for name, tensor in renamed.items()}


FAMILY: Final = Family(
    class_name="BeitForImageClassification",
    model_type="beit",
    classifier="classifier.weight",
    config=_config,
    convert=_convert,
    unused=_unused,
    image_processor="BeitImageProcessor",
    hub_names=_hub_names,
    resizes=True,
)
