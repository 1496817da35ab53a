"""DeiTForImageClassification and …WithTeacher (transformers/models/deit/modeling_deit.py).

Both carry the distillation token; only the second has the head that reads it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from model.checkpoint.huggingface.family import Family, encoder_names, encoder_renames

FAMILY: Final = Family(
    class_name="DeiTForImageClassification",
    model_type="deit",
    image_processor="DeiTImageProcessor",
    names=encoder_names("deit") | {"dist_token": "deit.embeddings.distillation_token"},
    # For masked image modelling, and the pooler of the bare model, which older files kept.
    unused=r"deit\.(embeddings\.mask_token|pooler\.dense\.(weight|bias))",
    architecture={"distillation_token": True},
    renames=encoder_renames("deit"),
)

WITH_TEACHER: Final = replace(
    FAMILY,
    class_name="DeiTForImageClassificationWithTeacher",
    names={**FAMILY.names, "head": "cls_classifier", "head_dist": "distillation_classifier"},
    architecture={"distillation_token": True, "distillation_head": True},
)
