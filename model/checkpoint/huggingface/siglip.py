"""SiglipForImageClassification: SigLIP's vision tower and a linear head (modeling_siglip.py).

The tower has CLIP's layout without the CLS token and the first norm. The head reads the mean of the
patches; the attention pooling is unused.

Siglip2ForImageClassification is the "naflex" kind of SigLIP 2, whose image processor gives each picture a size of its
own, by its aspect (modeling_siglip2.py). The network is read for one size, which the operator has to say. The kinds of
SigLIP 2 of one size (`google/siglip2-base-patch16-224`) are of the class Siglip….
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final

import torch.nn.functional as F
from pydantic import model_validator
from torch import Tensor

from model.checkpoint.huggingface import clip
from model.checkpoint.huggingface.family import Count, MlpConfig
from model.checkpoint.resizing import resized_config
from model.checkpoint.tensors import TensorSource, take_model
from model.config import Size, ViTConfig

FAMILY: Final = replace(
    clip.FAMILY,
    class_name="SiglipForImageClassification",
    model_type="siglip",
    image_processor="SiglipImageProcessor",
    unused=r"vision_model\.(head\..*|embeddings\.position_ids)",
    architecture={"class_token": False, "pool": "mean"},
    # Those of SiglipVisionConfig (configuration_siglip.py); its other defaults are CLIPVisionConfig's.
    vision_defaults={
        **(clip.FAMILY.vision_defaults or {}),
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
)


class _NaflexConfig(MlpConfig):
    num_patches: Count

    @model_validator(mode="before")
    @classmethod
    def _sized(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Add the size at which its positions need no resizing."""
        patches, patch = fields.get("num_patches"), fields.get("patch_size")
        if type(patches) is not int or type(patch) is not int or not 0 < patches < 1e6:
            raise ValueError(f"num_patches {patches!r:.100}, patch_size {patch!r:.100}: expected whole numbers")
        if math.isqrt(patches) ** 2 != patches:
            raise ValueError(f"num_patches {patches}: its class needs a square")
        return fields | {"image_size": math.isqrt(patches) * patch}


class _Naflex(clip.VisionTower):
    def convert(self, stored: TensorSource, config: ViTConfig, size: Size) -> tuple[ViTConfig, dict[str, Tensor]]:
        width, patch = config.width, config.patch_size
        embeddings = "vision_model.embeddings"
        # Its patches are flattened rows first, channels last.
        flat = stored.take(f"{embeddings}.patch_embedding.weight", width, patch * patch * config.in_channels)
        kernel = flat.reshape(width, patch, patch, config.in_channels).permute(0, 3, 1, 2).contiguous()
        positions = stored.take(f"{embeddings}.position_embedding.weight", config.position_tokens, width)
        tensors = take_model(
            stored, config, self.names, {"patch_embed.proj.weight": kernel, "pos_embed": positions.unsqueeze(0)}
        )
        resized = resized_config(config, size, stored.where)
        grid = positions.t().reshape(1, width, *config.grid)
        grid = F.interpolate(grid, size=resized.grid, mode="bilinear", antialias=True)
        return resized, tensors | {"pos_embed": grid.flatten(2).transpose(1, 2).contiguous()}


NAFLEX: Final = _Naflex(
    **vars(
        replace(
            FAMILY,
            class_name="Siglip2ForImageClassification",
            model_type="siglip2",
            config=_NaflexConfig,
            vision_defaults={**(FAMILY.vision_defaults or {}), "num_patches": 256},
            resizes=True,
            each_its_size=True,
        )
    )
)
