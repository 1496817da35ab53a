"""DeiTForImageClassification and …WithTeacher (transformers/models/deit/modeling_deit.py).

Both carry the distillation token; only the second has the head that reads it.
"""

from __future__ import annotations

from dataclasses import replace
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

_UNUSED: Final = frozenset({"deit.embeddings.mask_token", "deit.pooler.dense.weight", "deit.pooler.dense.bias"})
"""For masked image modelling, and the pooler of the bare model, which older files kept."""


class _Config(VisionConfig):
    intermediate_size: Count


def _one_head(json: dict[str, Any], classes: int) -> ViTConfig:
    config = _Config.model_validate(json)
    return config.vit_config(mlp_width=config.intermediate_size, num_classes=classes, distillation_token=True)


def _two_heads(json: dict[str, Any], classes: int) -> ViTConfig:
    return _one_head(json, classes).model_copy(update={"distillation_head": True})


def _convert(stored: TensorSource, config: ViTConfig, size: Size) -> Converted:
    width = config.width
    tensors: dict[str, Tensor] = {
        "cls_token": stored.take("deit.embeddings.cls_token", 1, 1, width),
        "dist_token": stored.take("deit.embeddings.distillation_token", 1, 1, width),
        "pos_embed": stored.take("deit.embeddings.position_embeddings", 1, config.position_tokens, width),
    }
    tensors |= take_patches(stored, "deit.embeddings.patch_embeddings.projection", config)
    tensors |= take_blocks(stored, encoder_names("deit"), config)
    tensors |= take_norm(stored, "deit.layernorm", "norm", width)
    if config.distillation_head:
        tensors |= take_linear(stored, "cls_classifier", "head", config.num_classes, width)
        tensors |= take_linear(stored, "distillation_classifier", "head_dist", config.num_classes, width)
    else:
        tensors |= take_linear(stored, "classifier", "head", config.num_classes, width)
    return config, tensors


FAMILY: Final = Family(
    class_name="DeiTForImageClassification",
    model_type="deit",
    classifier="classifier.weight",
    config=_one_head,
    convert=_convert,
    unused=_UNUSED.__contains__,
    image_processor="DeiTImageProcessor",
    hub_names=rename_encoder("deit"),
)

WITH_TEACHER: Final = replace(
    FAMILY,
    class_name="DeiTForImageClassificationWithTeacher",
    classifier="cls_classifier.weight",
    config=_two_heads,
)
