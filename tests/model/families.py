"""Tiny configurations of all kinds of models that readers know, with all native switches."""

from typing import Any, Final

from model.checkpoint.huggingface import FAMILIES
from model.checkpoint.timm_architectures import architectures
from model.checkpoint.timm_arguments import parse_arguments
from model.config import ViTConfig
from model.layer_config import RotaryPositions

_SMALL: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "num_channels": 3,
    "image_size": 16,
    "patch_size": 8,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
}
_DINO: Final[dict[str, Any]] = {"mlp_ratio": 2, "use_swiglu_ffn": False}
_BEIT: Final[dict[str, Any]] = {
    "layer_scale_init_value": 0.1,
    "use_absolute_position_embeddings": False,
    "use_relative_position_bias": True,
    "use_shared_relative_position_bias": False,
    "use_mean_pooling": True,
}

HUGGING_FACE: Final[dict[str, list[dict[str, Any]]]] = {
    "ViTForImageClassification": [
        {},
        {"hidden_act": "relu", "num_channels": 1},
        {"image_size": 19},
    ],
    "DeiTForImageClassification": [{}],
    "DeiTForImageClassificationWithTeacher": [{}],
    "Dinov2ForImageClassification": [_DINO, _DINO | {"use_swiglu_ffn": True}],
    "Dinov2WithRegistersForImageClassification": [_DINO | {"num_register_tokens": 3}],
    "BeitForImageClassification": [
        _BEIT,
        _BEIT
        | {
            "use_mean_pooling": False,
            "use_absolute_position_embeddings": True,
            "layer_scale_init_value": 0.0,
        },
    ],
    "SiglipForImageClassification": [{}],
    "CLIPForImageClassification": [{"hidden_act": "quick_gelu"}],
    "MetaClip2ForImageClassification": [{"hidden_act": "quick_gelu"}],
    "ViTMSNForImageClassification": [{}],
    "IJepaForImageClassification": [{}],
    "Data2VecVisionForImageClassification": [_BEIT],
    "CLIPModel": [{"hidden_act": "quick_gelu"}],
    "SiglipModel": [{}],
}
"""Fields of `config.json` of each class of transformers, without sizes."""

NATIVE: Final[dict[str, dict[str, Any]]] = {
    "max": {"pool": "max", "qk_norm": True},
    "mean-max": {"pool": "mean_max", "norm_after_pool": True},
    "transfer": {"pool": "transfer"},
    "linear patches, sincos, not square": {
        "image_size": (16, 24),
        "patch_embedding": "linear",
        "position_embedding": "sincos2d",
        "projection_bias": False,
    },
    "post-norm": {"norm_order": "post", "layer_scale": True},
    "residual post-norm": {"norm_order": "res_post", "layer_scale": True},
    "inner width": {"attention_width": 16, "pool": "mean"},
    "norms of patches": {"patch_embedding": "linear", "patch_norms": True},
    "convolutions": {
        "conv_stem": {"widths": (6, 8), "kernels": (3, 3), "strides": (2, 1), "pools": (1, 2)}
    },
    "root alone": {"image_size": (16, 16), "stem": {"layers": []}},
}


def families() -> dict[str, ViTConfig]:
    """Return a configuration of each kind by a name that tells its origin, without duplicates."""
    found: dict[str, ViTConfig] = {}
    for family in FAMILIES:
        for number, fields in enumerate(HUGGING_FACE[family.class_name]):
            json = _SMALL | fields
            nested = {"vision_config": json} if family.vision_defaults is not None else json
            found[f"{family.class_name} {number}"] = family.vit_config(nested, 5)
    for name, arguments in architectures().items():
        found[f"timm {name}"] = _timm(arguments)
    for name, fields in NATIVE.items():
        sizes = {
            "image_size": (16, 16),
            "patch_size": 8,
            "width": 32,
            "depth": 2,
            "heads": 2,
            "mlp_width": 64,
        }
        found[f"native {name}"] = ViTConfig.model_validate(sizes | {"num_classes": 5} | fields)
    alike = {_kind(config): name for name, config in reversed(found.items())}
    return {name: found[name] for name in reversed(alike.values())}


def _timm(arguments: dict[str, Any]) -> ViTConfig:
    stem = arguments.get("stem_layers")
    stages = {} if stem is None else {"stem_layers": [1] * len(stem)}
    patch = 8 if stem is None else 1
    sizes = {
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": patch,
        "num_classes": 5,
    }
    made = parse_arguments(arguments | sizes | stages | {"img_size": 16})
    edge = 2 * made.patch_edge
    return made.model_copy(update={"img_size": (edge, edge)}).vit_config()


def _kind(config: ViTConfig) -> ViTConfig:
    """Return the configuration without numbers that change no operator."""
    rotary = config.rotary and RotaryPositions(learned=config.rotary.learned)
    return config.model_copy(
        update={"norm_eps": 1e-6, "registers": min(config.registers, 1), "rotary": rotary}
    )
