"""ViTForImageClassification (transformers/models/vit/modeling_vit.py)."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

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

_UNUSED: Final = frozenset({"vit.embeddings.mask_token", "vit.pooler.dense.weight", "vit.pooler.dense.bias"})
"""For masked image modelling, and the pooler of the bare model, which older files kept."""


class _Config(VisionConfig):
    intermediate_size: Count


def _config(json: dict[str, Any], classes: int) -> ViTConfig:
    config = _Config.model_validate(json)
    return config.vit_config(mlp_width=config.intermediate_size, num_classes=classes)


def _convert(stored: TensorSource, config: ViTConfig, size: Size) -> Converted:
    width = config.width
    tensors: dict[str, Tensor] = {
        "cls_token": stored.take("vit.embeddings.cls_token", 1, 1, width),
        "pos_embed": stored.take("vit.embeddings.position_embeddings", 1, config.position_tokens, width),
    }
    tensors |= take_patches(stored, "vit.embeddings.patch_embeddings.projection", config)
    tensors |= take_blocks(stored, encoder_names("vit"), config)
    tensors |= take_norm(stored, "vit.layernorm", "norm", width)
    tensors |= take_linear(stored, "classifier", "head", config.num_classes, width)
    return config, tensors


FAMILY: Final = Family(
    class_name="ViTForImageClassification",
    model_type="vit",
    classifier="classifier.weight",
    config=_config,
    convert=_convert,
    unused=_UNUSED.__contains__,
    image_processor="ViTImageProcessor",
    hub_names=rename_encoder("vit"),
)
