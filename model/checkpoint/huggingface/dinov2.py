"""Dinov2ForImageClassification, with and without registers (transformers/models/dinov2*/modeling_*.py).

The classes take any input size and resize their positions to it at each forward pass, the released
ones always (trained at 518 px, preprocessed to 224 px); here it is done once, while reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import Field
from torch import Tensor

from model.checkpoint.huggingface.family import ATTENTION_RENAMES, Family, VisionConfig, encoder_names
from model.checkpoint.resizing import resized_config, resized_positions
from model.checkpoint.tensors import Names, TensorSource, fuse_pairs, take_model
from model.config import Size, ViTConfig
from model.errors import CheckpointError


class _Config(VisionConfig):
    mlp_ratio: Annotated[float, Field(gt=0, le=64)]
    use_swiglu_ffn: bool

    def architecture(self) -> dict[str, Any]:
        hidden = int(self.hidden_size * self.mlp_ratio)
        fields = super().architecture() | {"mlp_width": hidden}
        if self.use_swiglu_ffn:
            # SwiGLU keeps the parameter count: two thirds, rounded up to a multiple of 8.
            fields |= {"mlp": "swiglu", "activation": "silu", "mlp_width": (int(hidden * 2 / 3) + 7) // 8 * 8}
        return fields


class _RegistersConfig(_Config):
    num_register_tokens: Annotated[int, Field(ge=0, le=1024)]

    def architecture(self) -> dict[str, Any]:
        return super().architecture() | {"registers": self.num_register_tokens}


def _names(model: str) -> Names:
    layer = f"{model}.encoder.layer.{{}}"
    return encoder_names(model) | {
        "reg_token": f"{model}.embeddings.register_tokens",
        "blocks.{}.norm1": f"{layer}.norm1",
        "blocks.{}.ls1.gamma": f"{layer}.layer_scale1.lambda1",
        "blocks.{}.norm2": f"{layer}.norm2",
        "blocks.{}.mlp.fc1": f"{layer}.mlp.fc1",
        "blocks.{}.mlp.fc2": f"{layer}.mlp.fc2",
        "blocks.{}.ls2.gamma": f"{layer}.layer_scale2.lambda1",
    }


class _Dinov2(Family):
    def hub_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        hub = super().hub_names(tensors)
        fuse_pairs(hub, ".mlp.gate_proj.", ".mlp.up_proj.", ".mlp.weights_in.")
        return hub

    def convert(self, stored: TensorSource, config: ViTConfig, size: Size) -> tuple[ViTConfig, dict[str, Tensor]]:
        width, patches = config.width, math.prod(config.grid)
        embeddings, mlp = f"{self.model_type}.embeddings", f"{self.model_type}.encoder.layer.{{}}.mlp"
        names = dict(self.names)
        if config.mlp == "swiglu":
            names |= {"blocks.{}.mlp.fc1": f"{mlp}.weights_in", "blocks.{}.mlp.fc2": f"{mlp}.weights_out"}
        position = stored.take(f"{embeddings}.position_embeddings", 1, patches + 1, width)
        # CLS has an entry of its own and registers have none: it is added to the token once and for all.
        cls_token = stored.take(f"{embeddings}.cls_token", 1, 1, width) + position[:, :1]
        if not config.registers and f"{embeddings}.register_tokens" in stored:
            stored.take(f"{embeddings}.register_tokens", 1, 0, width)
        tensors = take_model(stored, config, names, {"cls_token": cls_token, "pos_embed": position[:, 1:]})

        edge = math.isqrt(patches)
        if edge * edge != patches:
            raise CheckpointError(f"{stored.where}: {patches} positions are not a square, as its class needs")
        # Whatever the config says of the image's size, the class reads its positions as a square.
        square = config.model_copy(update={"image_size": (edge * config.patch_size, edge * config.patch_size)})
        resized = resized_config(config, size, stored.where)
        return resized, resized_positions(tensors, square, resized, antialias=self.antialias)


FAMILY: Final = _Dinov2(
    class_name="Dinov2ForImageClassification",
    model_type="dinov2",
    image_processor="BitImageProcessor",
    names=_names("dinov2"),
    unused=r"dinov2\.embeddings\.mask_token",  # for masked image modelling
    config=_Config,
    architecture={"position_prefix": False, "layer_scale": True, "pool": "cls_mean"},
    renames=(*ATTENTION_RENAMES, (r"\.mlp\.down_proj\.", ".mlp.weights_out.")),
    resizes=True,
)

WITH_REGISTERS: Final = replace(
    FAMILY,
    class_name="Dinov2WithRegistersForImageClassification",
    model_type="dinov2_with_registers",
    names=_names("dinov2_with_registers"),
    unused=r"dinov2_with_registers\.embeddings\.mask_token",
    config=_RegistersConfig,
    antialias=True,
)
