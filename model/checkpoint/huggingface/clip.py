"""CLIPForImageClassification: CLIP's vision tower and a linear head (transformers/models/clip/modeling_clip.py).

The head reads the mean of the patches before the last norm, which is therefore unused.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor

from model.checkpoint.files import TensorSource
from model.checkpoint.huggingface.family import (
    BlockNames,
    Converted,
    Count,
    Family,
    VisionConfig,
    take_blocks,
    take_linear,
    take_norm,
    take_patches,
)
from model.config import Size, ViTConfig

BLOCKS: Final = BlockNames(
    prefix="vision_model.encoder.layers.{}.",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    norm1="layer_norm1",
    norm2="layer_norm2",
    fc1="mlp.fc1",
    fc2="mlp.fc2",
)
"""Also SigLIP's."""

DEFAULTS: Final = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
"""CLIPVisionConfig's: nested configs name only what differs from their class (configuration_clip.py)."""


class Config(VisionConfig):
    """Also SigLIP's."""

    intermediate_size: Count


def vision_json(json: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The nested `vision_config`, completed by its class's defaults."""
    nested = json.get("vision_config")
    return defaults | nested if isinstance(nested, dict) else {}


def _config(json: dict[str, Any], classes: int) -> ViTConfig:
    config = Config.model_validate(vision_json(json, DEFAULTS))
    return config.vit_config(
        mlp_width=config.intermediate_size,
        num_classes=classes,
        patch_bias=False,
        norm_before_blocks=True,
        pool="mean",
        final_norm=False,
    )


def _convert(stored: TensorSource, config: ViTConfig, size: Size) -> Converted:
    width = config.width
    position = stored.take("vision_model.embeddings.position_embedding.weight", config.position_tokens, width)
    tensors: dict[str, Tensor] = {
        "cls_token": stored.take("vision_model.embeddings.class_embedding", width).reshape(1, 1, width),
        "pos_embed": position.unsqueeze(0),
    }
    tensors |= take_patches(stored, "vision_model.embeddings.patch_embedding", config)
    tensors |= take_norm(stored, "vision_model.pre_layrnorm", "norm_pre", width)  # upstream's spelling
    tensors |= take_blocks(stored, BLOCKS, config)
    tensors |= take_linear(stored, "classifier", "head", config.num_classes, width)
    return config, tensors


def _unused(name: str) -> bool:
    return name.startswith("vision_model.post_layernorm.") or name == "vision_model.embeddings.position_ids"


FAMILY: Final = Family(
    class_name="CLIPForImageClassification",
    model_type="clip",
    classifier="classifier.weight",
    config=_config,
    convert=_convert,
    unused=_unused,
    image_processor="CLIPImageProcessor",
)
