"""ViTForImageClassification (transformers/models/vit/modeling_vit.py) and the classes that differ in little.

ViT-MSN (Assran et al. 2022) is the same network. I-JEPA (Assran et al. 2023) has no CLS token, and its head reads the
mean of the patches. Both DeiTForImageClassification and …WithTeacher (transformers/models/deit/modeling_deit.py) carry
the distillation token; only the second has the head that reads it.
"""

from __future__ import annotations

from dataclasses import replace
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

MSN: Final = replace(
    FAMILY,
    class_name="ViTMSNForImageClassification",
    model_type="vit_msn",
    # transformers 5 writes the names of its blocks without the model's.
    renames=((r"^encoder\.", "vit.encoder."), *FAMILY.renames),
)

IJEPA: Final = replace(
    FAMILY,
    class_name="IJepaForImageClassification",
    model_type="ijepa",
    names=encoder_names("ijepa"),
    unused=r"ijepa\.(embeddings\.mask_token|pooler\.dense\.(weight|bias))",
    architecture={"class_token": False, "pool": "mean"},
    renames=encoder_renames("ijepa"),
)

DEIT: Final = Family(
    class_name="DeiTForImageClassification",
    model_type="deit",
    image_processor="DeiTImageProcessor",
    names=encoder_names("deit") | {"dist_token": "deit.embeddings.distillation_token"},
    # For masked image modelling, and the pooler of the bare model, which older files kept.
    unused=r"deit\.(embeddings\.mask_token|pooler\.dense\.(weight|bias))",
    architecture={"distillation_token": True},
    renames=encoder_renames("deit"),
)

DEIT_WITH_TEACHER: Final = replace(
    DEIT,
    class_name="DeiTForImageClassificationWithTeacher",
    names={**DEIT.names, "head": "cls_classifier", "head_dist": "distillation_classifier"},
    architecture={"distillation_token": True, "distillation_head": True},
)
