"""SiglipForImageClassification: SigLIP's vision tower and a linear head (modeling_siglip.py).

The tower has CLIP's layout without the CLS token and the first norm. The head reads the mean of the
patches; the attention pooling is unused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from model.checkpoint.huggingface import clip

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
