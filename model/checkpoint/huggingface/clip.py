"""CLIPForImageClassification: CLIP's vision tower and a linear head (transformers/models/clip/modeling_clip.py).

The head reads the mean of the patches before the last norm, which is therefore unused. MetaCLIP 2 is the same network.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from torch import Tensor

from model.checkpoint.huggingface.family import Family
from model.checkpoint.tensors import TensorSource, take_model
from model.config import Size, ViTConfig

_EMBEDDINGS: Final = "vision_model.embeddings"
_LAYER: Final = "vision_model.encoder.layers.{}"
_ATTENTION: Final = f"{_LAYER}.self_attn"


class VisionTower(Family):
    """A family whose positions are an `nn.Embedding` [tokens, D] and whose CLS token is a vector [D]."""

    def convert(self, stored: TensorSource, config: ViTConfig, size: Size) -> tuple[ViTConfig, dict[str, Tensor]]:
        """Return the architecture and the model's tensors; see `Family.convert`."""
        width = config.width
        position = stored.take(f"{_EMBEDDINGS}.position_embedding.weight", config.position_tokens, width)
        taken = {"pos_embed": position.unsqueeze(0)}
        if config.class_token:
            taken["cls_token"] = stored.take(f"{_EMBEDDINGS}.class_embedding", width).reshape(1, 1, width)
        return config, take_model(stored, config, self.names, taken)


FAMILY: Final = VisionTower(
    class_name="CLIPForImageClassification",
    model_type="clip",
    image_processor="CLIPImageProcessor",
    names={
        "patch_embed.proj": f"{_EMBEDDINGS}.patch_embedding",
        "norm_pre": "vision_model.pre_layrnorm",  # upstream's spelling
        "blocks.{}.norm1": f"{_LAYER}.layer_norm1",
        "blocks.{}.attn.qkv": (f"{_ATTENTION}.q_proj", f"{_ATTENTION}.k_proj", f"{_ATTENTION}.v_proj"),
        "blocks.{}.attn.proj": f"{_ATTENTION}.out_proj",
        "blocks.{}.norm2": f"{_LAYER}.layer_norm2",
        "blocks.{}.mlp.fc1": f"{_LAYER}.mlp.fc1",
        "blocks.{}.mlp.fc2": f"{_LAYER}.mlp.fc2",
        "norm": "vision_model.post_layernorm",
        "head": "classifier",
    },
    unused=r"vision_model\.(post_layernorm\..*|embeddings\.position_ids)",
    architecture={"patch_bias": False, "norm_before_blocks": True, "pool": "mean", "final_norm": False},
    # Those of CLIPVisionConfig: nested configs name only what differs from their class (configuration_clip.py).
    vision_defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
)

METACLIP_2: Final = replace(FAMILY, class_name="MetaClip2ForImageClassification", model_type="metaclip_2")
