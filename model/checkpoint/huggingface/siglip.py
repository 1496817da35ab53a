"""SiglipForImageClassification: SigLIP's vision tower and a linear head (modeling_siglip.py).

There is no CLS token; the head reads the mean of the patches, and the attention pooling is unused.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from model.checkpoint.files import TensorSource
from model.checkpoint.huggingface.clip import BLOCKS, Config, vision_json
from model.checkpoint.huggingface.family import (
    Converted,
    Family,
    take_blocks,
    take_linear,
    take_norm,
    take_patches,
)
from model.config import Size, ViTConfig

_DEFAULTS: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
"""SiglipVisionConfig's: nested configs name only what differs from their class (configuration_siglip.py)."""


def _config(json: dict[str, Any], classes: int) -> ViTConfig:
    config = Config.model_validate(vision_json(json, _DEFAULTS))
    return config.vit_config(mlp_width=config.intermediate_size, num_classes=classes, class_token=False, pool="mean")


def _convert(stored: TensorSource, config: ViTConfig, size: Size) -> Converted:
    width = config.width
    position = stored.take("vision_model.embeddings.position_embedding.weight", config.position_tokens, width)
    tensors: dict[str, Tensor] = {"pos_embed": position.unsqueeze(0)}
    tensors |= take_patches(stored, "vision_model.embeddings.patch_embedding", config)
    tensors |= take_blocks(stored, BLOCKS, config)
    tensors |= take_norm(stored, "vision_model.post_layernorm", "norm", width)
    tensors |= take_linear(stored, "classifier", "head", config.num_classes, width)
    return config, tensors


def _unused(name: str) -> bool:
    return name.startswith("vision_model.head.") or name == "vision_model.embeddings.position_ids"


FAMILY: Final = Family(
    class_name="SiglipForImageClassification",
    model_type="siglip",
    classifier="classifier.weight",
    config=_config,
    convert=_convert,
    unused=_unused,
    image_processor="SiglipImageProcessor",
)
