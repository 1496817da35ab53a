"""BeitForImageClassification (transformers/models/beit/modeling_beit.py), and data2vec-vision, the same network.

Positions are relative biases, a block each or shared by all, or learned, or both; the class resizes
them to the input at each forward pass, here it is done once, while reading.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator
from torch import Tensor

from model.checkpoint.huggingface.family import Family, MlpConfig, encoder_names, encoder_renames
from model.checkpoint.resizing import resized_config, resized_positions
from model.checkpoint.tensors import TensorSource, take_model
from model.config import Size, ViTConfig
from model.errors import CheckpointError
from model.network.layers.position import relative_table_size

_TABLE: Final = "relative_position_bias.relative_position_bias_table"


class _Config(MlpConfig):
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

    def architecture(self) -> dict[str, Any]:
        return super().architecture() | {
            "position_embedding": "learned" if self.use_absolute_position_embeddings else "none",
            "relative_position_bias": self.use_relative_position_bias or self.use_shared_relative_position_bias,
            "layer_scale": self.layer_scale_init_value > 0,
            "pool": "mean" if self.use_mean_pooling else "cls",
            "norm_after_pool": self.use_mean_pooling,
        }


class _Beit(Family):
    def convert(self, stored: TensorSource, config: ViTConfig, size: Size) -> tuple[ViTConfig, dict[str, Tensor]]:
        resized = resized_config(config, size, stored.where)
        model = self.model_type.replace("-", "_")
        tables = _tables(stored, config, f"{model}.encoder") if config.relative_position_bias else {}
        tensors = take_model(stored, config, self.names, tables)
        return resized, resized_positions(tensors, config, resized, antialias=False)


def _tables(stored: TensorSource, config: ViTConfig, encoder: str) -> dict[str, Tensor]:
    """Return each block's relative position biases, by the model's names; a shared table counts in each block."""
    shape = relative_table_size(config.grid), config.heads
    name = f"{encoder}.{_TABLE}"
    shared = stored.take(name, *shape) if name in stored else None
    tables = {}
    for index in range(config.depth):
        name = f"{encoder}.layer.{index}.attention.attention.{_TABLE}"
        if name not in stored and shared is None:
            raise CheckpointError(f"{stored.where}: missing key {name!r}")
        # The class adds both to the scores.
        parts = [stored.take(name, *shape)] if name in stored else []
        parts += [] if shared is None else [shared]
        tables[f"blocks.{index}.attn.relative_position_bias_table"] = sum(parts[1:], start=parts[0])
    return tables


def _family(class_name: str, model_type: str) -> Family:
    model = model_type.replace("-", "_")
    layer = f"{model}.encoder.layer.{{}}"
    attention = f"{layer}.attention.attention"
    return _Beit(
        class_name=class_name,
        model_type=model_type,
        image_processor="BeitImageProcessor",
        names=encoder_names(model)
        | {
            "blocks.{}.attn.qkv.bias": (f"{attention}.query.bias", None, f"{attention}.value.bias"),
            "blocks.{}.ls1.gamma": f"{layer}.lambda_1",
            "blocks.{}.ls2.gamma": f"{layer}.lambda_2",
            "fc_norm": f"{model}.pooler.layernorm",
        },
        # Indices that follow from the grid, and the token of masked image modelling.
        unused=rf".*relative_position_index|{model}\.embeddings\.mask_token",
        config=_Config,
        architecture={"qkv_bias": True},
        renames=(
            *encoder_renames(model),
            (rf"{model}\.shared_position_bias\.", f"{model}.encoder.relative_position_bias."),
            (rf"({model}\.encoder\.layer\.\d+\.)(relative_position_bias\.)", r"\1attention.attention.\2"),
        ),
        resizes=True,
    )


FAMILY: Final = _family("BeitForImageClassification", "beit")
DATA2VEC: Final = _family("Data2VecVisionForImageClassification", "data2vec-vision")
