"""Small valid folders of the three core formats, and functions that spoil them."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network.vit import VisionTransformer

SIZE = 16
PREPROCESS = PreprocessConfig(
    size=(SIZE, SIZE),
    resize="squash",
    resize_size=(SIZE, SIZE),
    interpolation="bilinear",
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)
CONFIG = ViTConfig(
    image_size=(SIZE, SIZE), patch_size=8, width=16, depth=2, heads=2, mlp_width=32, num_classes=3
)


def tiny(config: ViTConfig = CONFIG) -> dict[str, Tensor]:
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model.state_dict()


def native_folder(folder: Path, labels: tuple[str, ...] = ("a", "b", "c")) -> Path:
    checkpoint = Checkpoint("tiny", "here", "vitserve", "tiny", CONFIG, PREPROCESS, labels, tiny())
    native.write(folder, checkpoint, dtype=torch.float32)
    return folder


def timm_folder(folder: Path) -> Path:
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "global_pool": "token",
        "label_names": ["a", "b", "c"],
        "model_args": {
            "patch_size": 8,
            "embed_dim": 16,
            "depth": 2,
            "num_heads": 2,
            "mlp_ratio": 2,
            "img_size": 16,
        },
        "pretrained_cfg": {
            "tag": "mine",
            "input_size": [3, 16, 16],
            "interpolation": "bicubic",
            "crop_pct": 0.9,
            "crop_mode": "center",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
        },
    }
    return _written(folder, {"config.json": config}, tiny())


# The model's names, and the names in transformers' files.
_THEIRS = (
    (r"^cls_token$", "embeddings.cls_token"),
    (r"^pos_embed$", "embeddings.position_embeddings"),
    (r"^patch_embed\.proj", "embeddings.patch_embeddings.projection"),
    (r"^norm\.", "layernorm."),
    (r"^blocks\.(\d)\.", r"encoder.layer.\1."),
    (r"attn\.([qkv][a-z]+)\.", r"attention.attention.\1."),
    (r"attn\.proj", "attention.output.dense"),
    (r"norm1", "layernorm_before"),
    (r"norm2", "layernorm_after"),
    (r"mlp\.fc1", "intermediate.dense"),
    (r"mlp\.fc2", "output.dense"),
)


def huggingface_folder(folder: Path) -> Path:
    config = {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "image_size": 16,
        "patch_size": 8,
        "num_channels": 3,
        "qkv_bias": True,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    }
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_normalize": True,
        "size": {"height": 16, "width": 16},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    theirs: dict[str, Tensor] = {}
    for name, tensor in tiny().items():
        parts = (
            dict(zip(("query", "key", "value"), tensor.chunk(3), strict=True))
            if ".qkv." in name
            else {"": tensor}
        )
        for part, rows in parts.items():
            named = name.replace("qkv", part) if part else name
            for ours, their in _THEIRS:
                named = re.sub(ours, their, named)
            named = (
                named.replace("head.", "classifier.")
                if name.startswith("head.")
                else f"vit.{named}"
            )
            theirs[named] = rows.contiguous()
    return _written(folder, {"config.json": config, "preprocessor_config.json": processor}, theirs)


def adapter_folder(folder: Path, base: str, rank: int = 2, width: int = 16) -> Path:
    """Write a LoRA adapter for one layer of `huggingface_folder`, as PEFT saves it."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "base_model_name_or_path": base}
    module = "base_model.model.vit.encoder.layer.0.attention.attention.query"
    pair = {
        f"{module}.lora_A.weight": torch.ones(rank, width),
        f"{module}.lora_B.weight": torch.ones(width, rank),
    }
    return _written(folder, {"adapter_config.json": config}, pair, "adapter_model.safetensors")


def _written(
    folder: Path, documents: dict[str, Any], tensors: dict[str, Tensor], weights: str = ""
) -> Path:
    folder.mkdir(exist_ok=True)
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))
    save_file(tensors, folder / (weights or "model.safetensors"))
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "native": native_folder,
    "timm": timm_folder,
    "huggingface": huggingface_folder,
}


def refusal(source: Path, **options: Any) -> str:
    """Return the line with which this source is refused."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(source), **options).build()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 900
    return message


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def put(path: Path, key: str, *values: Any) -> None:
    """Set a dotted key of a JSON file, or remove it if no value is given."""

    def change(config: dict[str, Any]) -> None:
        *parents, name = key.split(".")
        for parent in parents:
            config = config[parent]
        config.pop(name, None)
        for value in values:
            config[name] = value

    edit(path, change)


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
