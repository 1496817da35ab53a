"""Small random models of each class of transformers, saved by the library."""

import json
from pathlib import Path
from typing import Any

import torch

from tests.model.checkpoint.parity import randomise
from tests.timm_reference import transformers

SMALL: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "intermediate_size": 96,
}
DINO = {k: v for k, v in SMALL.items() if k != "intermediate_size"} | {"mlp_ratio": 2}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", SMALL),
    "vit-patch14-336": ("ViTForImageClassification", SMALL | {"image_size": 336, "patch_size": 14}),
    "vit-not-square": ("ViTForImageClassification", SMALL | {"image_size": [24, 56]}),
    "vit-no-qkv-bias": ("ViTForImageClassification", SMALL | {"qkv_bias": False}),
    "vit-7-classes-5-layers": (
        "ViTForImageClassification",
        SMALL | {"num_labels": 7, "num_hidden_layers": 5},
    ),
    "vit-relu": (
        "ViTForImageClassification",
        SMALL | {"hidden_act": "relu", "layer_norm_eps": 1e-3},
    ),
    "vit-gelu-fast": ("ViTForImageClassification", SMALL | {"hidden_act": "gelu_fast"}),
    "vit-gelu-accurate": ("ViTForImageClassification", SMALL | {"hidden_act": "gelu_accurate"}),
    "vit-tanh": ("ViTForImageClassification", SMALL | {"hidden_act": "tanh"}),
    "vit-greyscale": ("ViTForImageClassification", SMALL | {"num_channels": 1}),
    "vit-remainder": ("ViTForImageClassification", SMALL | {"image_size": 35}),
    "deit": ("DeiTForImageClassification", SMALL),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", SMALL | {"num_labels": 7}),
    "dinov2": ("Dinov2ForImageClassification", DINO),
    "dinov2-swiglu": ("Dinov2ForImageClassification", DINO | {"use_swiglu_ffn": True}),
    "dinov2-no-mask-token": (
        "Dinov2ForImageClassification",
        DINO | {"use_mask_token": False, "qkv_bias": False},
    ),
    "dinov2-registers": (
        "Dinov2WithRegistersForImageClassification",
        DINO | {"num_register_tokens": 3},
    ),
    "dinov2-registers-swiglu": (
        "Dinov2WithRegistersForImageClassification",
        DINO | {"use_swiglu_ffn": True},
    ),
    "beit": ("BeitForImageClassification", SMALL | {"use_relative_position_bias": True}),
    "beit-shared": (
        "BeitForImageClassification",
        SMALL | {"use_shared_relative_position_bias": True, "image_size": [32, 32]},
    ),
    "beit-absolute-cls": (
        "BeitForImageClassification",
        SMALL
        | {
            "use_absolute_position_embeddings": True,
            "use_mean_pooling": False,
            "use_mask_token": True,
        }
        | {"layer_scale_init_value": 0.0},
    ),
    "beit-both": (
        "BeitForImageClassification",
        SMALL | {"use_relative_position_bias": True, "use_shared_relative_position_bias": True},
    ),
    "siglip": ("SiglipForImageClassification", SMALL),
    "clip": ("CLIPForImageClassification", SMALL),
    "metaclip-2": ("MetaClip2ForImageClassification", SMALL),
    "vit-msn": ("ViTMSNForImageClassification", SMALL),
    "ijepa": ("IJepaForImageClassification", SMALL),
    "data2vec": (
        "Data2VecVisionForImageClassification",
        SMALL | {"use_relative_position_bias": True},
    ),
    "data2vec-shared-cls": (
        "Data2VecVisionForImageClassification",
        SMALL | {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
    ),
}


def make(case: str, folder: Path, **more: Any) -> Any:
    """Save a random model of a case with a preprocessor; return the model in evaluation mode."""
    library = transformers()
    name, options = CASES[case]
    torch.manual_seed(0)
    config_class = getattr(library, name).config_class
    labels = {"num_labels": 5} | {k: v for k, v in options.items() if k == "num_labels"}
    rest = {k: v for k, v in options.items() if k != "num_labels"}
    config = (
        config_class(vision_config=rest, **labels)
        if name[:4] in ("CLIP", "Sigl", "Meta")
        else config_class(**rest, **labels)
    )
    config._attn_implementation = "eager"
    model = getattr(library, name)._from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder, **more)
    size = rest["image_size"]
    rows, columns = size if isinstance(size, list) else (size, size)
    write_preprocessor(folder, rows, columns, rest.get("num_channels", 3))
    return model


def write_preprocessor(folder: Path, rows: int, columns: int, channels: int = 3) -> None:
    """Return an image processor that squashes, like ViT's."""
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_center_crop": False,
        "size": {"height": rows, "width": columns},
        "resample": 2,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * channels,
        "image_std": [0.25] * channels,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
