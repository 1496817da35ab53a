"""The classes of transformers that are read: one declaration each, of names, config and positions.

Source: transformers/models/*/modeling_*.py and configuration_*.py. To add a class, add one `Family`
to `FAMILIES`.
"""

from dataclasses import replace
from functools import partial
from typing import Final

from model.checkpoint.huggingface.family import Family, no_fields
from model.checkpoint.huggingface.fields import beit_fields, dinov2_fields, siglip_fields
from model.checkpoint.huggingface.names import TOWERS
from model.checkpoint.huggingface.positions import place_beit, place_dinov2, place_tower

_VIT: Final = Family("ViTForImageClassification", "vit", "ViTImageProcessor")
_DEIT: Final = Family(
    "DeiTForImageClassification",
    "deit",
    "DeiTImageProcessor",
    architecture={"distillation_token": True},
)
_DINOV2: Final = Family(
    "Dinov2ForImageClassification",
    "dinov2",
    "BitImageProcessor",
    fields=dinov2_fields,
    place=place_dinov2,
    architecture={"position_prefix": False, "layer_scale": True, "pool": "cls_mean"},
    resizes=True,
)
_BEIT: Final = Family(
    "BeitForImageClassification",
    "beit",
    "BeitImageProcessor",
    fields=beit_fields,
    place=place_beit,
    architecture={"qkv_bias": True},
    key_bias=False,
    resizes=True,
)
_CLIP: Final = Family(
    "CLIPForImageClassification",
    "clip",
    "CLIPImageProcessor",
    rules=TOWERS,
    # The head reads the mean of the patches before the last norm, which is therefore unused.
    unused=r"vision_model\.(post_layernorm\..*|embeddings\.position_ids)",
    place=place_tower,
    architecture={
        "patch_bias": False,
        "norm_before_blocks": True,
        "pool": "mean",
        "final_norm": False,
    },
    # Those of CLIPVisionConfig: nested configs name only what differs from their class.
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
_SIGLIP: Final = replace(
    _CLIP,
    class_name="SiglipForImageClassification",
    model_type="siglip",
    image_processor="SiglipImageProcessor",
    unused=r"vision_model\.(head\..*|embeddings\.position_ids)",
    architecture={"class_token": False, "pool": "mean"},
    # Those of SiglipVisionConfig; its other defaults are CLIPVisionConfig's.
    vision_defaults={
        **(_CLIP.vision_defaults or {}),
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
)
CLIP: Final = replace(
    _CLIP,
    class_name="CLIPModel",
    unused=r"vision_model\.embeddings\.position_ids",
    fields=lambda json, where: {"projection_width": json["projection_dim"]},
    architecture={"patch_bias": False, "norm_before_blocks": True, "normalized_head": True},
)
# The whole model. SigLIP 2 of one resolution has this class, too.
SIGLIP: Final = replace(
    _SIGLIP,
    class_name="SiglipModel",
    unused=r"vision_model\.embeddings\.position_ids",
    fields=siglip_fields,
    architecture={"class_token": False, "pool": "attention", "normalized_head": True},
)
# transformers 5 saves a tower alone without the tower's name.
_NAMED_TOWER: Final = ((r"^(?!vision_model\.|visual_projection\.)", "vision_model."), *TOWERS)
_CLIP_TOWER: Final = replace(
    CLIP,
    rules=_NAMED_TOWER,
    class_name="CLIPVisionModel",
    model_type="clip_vision_model",
    fields=no_fields,
    architecture={"patch_bias": False, "norm_before_blocks": True},
)
# Classes of one image tower without a head, whose config is not nested.
IMAGE_TOWERS: Final = (
    _CLIP_TOWER,
    replace(_CLIP_TOWER, class_name="CLIPVisionModelWithProjection", fields=CLIP.fields),
    replace(
        SIGLIP,
        class_name="SiglipVisionModel",
        model_type="siglip_vision_model",
        rules=_NAMED_TOWER,
        architecture={"class_token": False, "pool": "attention"},
    ),
)

FAMILIES: Final[tuple[Family, ...]] = (
    _VIT,
    replace(_VIT, class_name="ViTMSNForImageClassification", model_type="vit_msn"),
    replace(
        _VIT,
        class_name="IJepaForImageClassification",
        model_type="ijepa",
        architecture={"class_token": False, "pool": "mean"},
    ),
    _DEIT,
    replace(
        _DEIT,
        class_name="DeiTForImageClassificationWithTeacher",
        architecture={"distillation_token": True, "distillation_head": True},
    ),
    _DINOV2,
    replace(
        _DINOV2,
        class_name="Dinov2WithRegistersForImageClassification",
        model_type="dinov2_with_registers",
        place=partial(place_dinov2, antialias=True),
        antialias=True,
    ),
    _BEIT,
    replace(_BEIT, class_name="Data2VecVisionForImageClassification", model_type="data2vec-vision"),
    _SIGLIP,
    _CLIP,
    replace(_CLIP, class_name="MetaClip2ForImageClassification", model_type="metaclip_2"),
    CLIP,
    SIGLIP,
)
