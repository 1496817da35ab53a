"""ViTForImageClassification (transformers/models/vit/modeling_vit.py)."""

from __future__ import annotations

from typing import Final

from model.checkpoint.huggingface.family import Family, encoder_names, encoder_renames

FAMILY: Final = Family(
    class_name="ViTForImageClassification",
    model_type="vit",
    image_processor="ViTImageProcessor",
    names=encoder_names("vit"),
    # For masked image modelling, and the pooler of the bare model, which older files kept.
    unused=r"vit\.(embeddings\.mask_token|pooler\.dense\.(weight|bias))",
    renames=encoder_renames("vit"),
)
