"""transformers' classes, saved by transformers and read by us: logits, attention rows, preprocessing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint
from model.checkpoint.huggingface import FAMILIES
from model.checkpoint.huggingface.families import CLIP, SIGLIP
from tests.model.checkpoint.folders import edit
from tests.model.checkpoint.parity import (
    assert_same_embeddings,
    assert_same_logits,
    assert_same_rows,
    pictures,
    randomise,
)
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
    "vit-7-classes-5-layers": ("ViTForImageClassification", SMALL | {"num_labels": 7, "num_hidden_layers": 5}),
    "vit-relu": ("ViTForImageClassification", SMALL | {"hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "vit-greyscale": ("ViTForImageClassification", SMALL | {"num_channels": 1}),
    "vit-remainder": ("ViTForImageClassification", SMALL | {"image_size": 35}),
    "deit": ("DeiTForImageClassification", SMALL),
    "deit-teacher": ("DeiTForImageClassificationWithTeacher", SMALL | {"num_labels": 7}),
    "dinov2": ("Dinov2ForImageClassification", DINO),
    "dinov2-swiglu": ("Dinov2ForImageClassification", DINO | {"use_swiglu_ffn": True}),
    "dinov2-no-mask-token": ("Dinov2ForImageClassification", DINO | {"use_mask_token": False, "qkv_bias": False}),
    "dinov2-registers": ("Dinov2WithRegistersForImageClassification", DINO | {"num_register_tokens": 3}),
    "dinov2-registers-swiglu": ("Dinov2WithRegistersForImageClassification", DINO | {"use_swiglu_ffn": True}),
    "beit": ("BeitForImageClassification", SMALL | {"use_relative_position_bias": True}),
    "beit-shared": ("BeitForImageClassification", SMALL | {"use_shared_relative_position_bias": True}),
    "beit-absolute-cls": (
        "BeitForImageClassification",
        SMALL
        | {"use_absolute_position_embeddings": True, "use_mean_pooling": False, "use_mask_token": True}
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
    "data2vec": ("Data2VecVisionForImageClassification", SMALL | {"use_relative_position_bias": True}),
    "data2vec-shared-cls": (
        "Data2VecVisionForImageClassification",
        SMALL | {"use_shared_relative_position_bias": True, "use_mean_pooling": False},
    ),
}

_OTHERS = """Bit ConvNext ConvNextV2 Cvt Dinat DonutSwin EfficientNet FocalNet HGNetV2 Hiera ImageGPT Levit MobileNetV1
MobileNetV2 MobileViT MobileViTV2 PPLCNet PoolFormer Pvt PvtV2 RegNet ResNet Segformer ShieldGemma2 Siglip2
SwiftFormer Swin Swinv2 TextNet"""
NO_PLAIN_TRANSFORMERS = {f"{name}ForImageClassification" for name in _OTHERS.split()} | {
    "LevitForImageClassificationWithTeacher",
    *(f"PerceiverForImageClassification{kind}" for kind in ("Learned", "Fourier", "ConvProcessing")),
}
"""Convolutions, windows, pyramids, decoders, and pictures of any aspect."""


def make(case: str, folder: Path, **more: Any) -> Any:
    """A random model of a case, saved with a preprocessor; returns the model in evaluation mode."""
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
    """A squashing image processor, as ViT's."""
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


@pytest.mark.parametrize("case", CASES)
def test_logits_embeddings_and_attention_rows_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, f"transformers {case}")
    assert checkpoint.labels == tuple(f"LABEL_{i}" for i in range(checkpoint.config.num_classes))
    read: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("classifier"):
            module.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.inference_mode():
        whole = torch.stack(model(pixels, output_attentions=True).attentions, dim=1)  # [B, layers, heads, N, N]
    assert len(read) == (2 if case == "deit-teacher" else 1)
    # Of two heads it is the mean of what they read, as in timm.
    assert_same_embeddings(checkpoint, pixels, {"head": torch.stack(read).mean(dim=0)})
    assert_same_rows(checkpoint, pixels, whole)


@pytest.mark.parametrize("case", ["vit", "deit-teacher", "dinov2-swiglu", "dinov2-registers", "beit", "vit-msn"])
def test_names_that_transformers_uses_in_memory_are_read_too(case: str, tmp_path: Path) -> None:
    model = make(case, tmp_path, save_original_format=False)
    assert_same_logits(load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, case)


def test_every_plain_vision_transformer_that_transformers_classifies_with_is_read() -> None:
    transformers()
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    names = {name for value in CLASSES.values() for name in ((value,) if isinstance(value, str) else value)}
    classifiers = {family.class_name for family in FAMILIES if family not in (CLIP, SIGLIP)}
    assert names - NO_PLAIN_TRANSFORMERS == classifiers | {"TimmWrapperForImageClassification"}


def test_sharded_safetensors_are_read_through_their_index(tmp_path: Path) -> None:
    model = make("vit", tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_logits(load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, "sharded")


def test_a_pickled_state_dict_is_read_as_data_where_there_is_no_safetensors(tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert_same_logits(load_checkpoint(str(tmp_path)), lambda pixels: model(pixels).logits, "pytorch_model.bin")


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *(("dinov2", (16, 16)), ("dinov2", (24, 40)), ("dinov2-registers", (24, 40)), ("dinov2-registers", (40, 40))),
        *(("beit", (48, 48)), ("beit-absolute-cls", (48, 48))),
    ],
)
def test_positions_are_resized_to_what_it_is_given_as_the_class_does(
    case: str, size: tuple[int, int], tmp_path: Path
) -> None:
    model = make(case, tmp_path)
    write_preprocessor(tmp_path, *size)
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.config.image_size == size
    assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, f"{case} at {size}")


@pytest.mark.parametrize("size", [(24, 40), (48, 48)])
def test_another_input_size_agrees_with_interpolate_pos_encoding(size: tuple[int, int], tmp_path: Path) -> None:
    model = make("vit", tmp_path)
    checkpoint = load_checkpoint(str(tmp_path), image_size=size)
    assert checkpoint.preprocess.size == size
    reference = lambda pixels: model(pixels, interpolate_pos_encoding=True).logits  # noqa: E731
    assert_same_logits(checkpoint, reference, f"vit at {size}")


def test_dinov2_at_an_asked_for_size_resizes_the_stored_positions_once(tmp_path: Path) -> None:
    model = make("dinov2", tmp_path)
    write_preprocessor(tmp_path, 16, 16)
    checkpoint = load_checkpoint(str(tmp_path), image_size=(48, 24))
    assert_same_logits(checkpoint, lambda pixels: model(pixels).logits, "dinov2 16 -> 48x24")


def test_beit_without_a_head_gives_the_mean_that_its_library_gives(tmp_path: Path) -> None:
    model = make("beit", tmp_path)
    model.beit.save_pretrained(tmp_path)
    checkpoint = load_checkpoint(str(tmp_path))
    pixels = pictures(checkpoint)
    with torch.inference_mode():
        expected = model.beit(pixels).pooler_output
    assert_same_embeddings(checkpoint, pixels, {"head": expected})


def test_labels_and_multi_label_come_from_the_config(tmp_path: Path) -> None:
    make("vit", tmp_path)
    labels = {str(i): f"class {i}" for i in range(5)}
    edit(tmp_path / "config.json", lambda c: c.update(id2label=labels, problem_type="multi_label_classification"))
    checkpoint = load_checkpoint(str(tmp_path))
    assert checkpoint.labels == tuple(labels.values())
    assert checkpoint.multi_label
