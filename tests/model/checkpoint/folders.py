"""Small good folders of three formats for the tests of refusals, and the means to spoil them."""

from __future__ import annotations

import json
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
CONFIG = ViTConfig(image_size=(SIZE, SIZE), patch_size=8, width=16, depth=2, heads=2, mlp_width=32, num_classes=3)


def tiny(config: ViTConfig = CONFIG) -> dict[str, Tensor]:
    model = VisionTransformer(config)
    model.reset_parameters(torch.Generator().manual_seed(0))
    return model.state_dict()


def native_folder(folder: Path) -> Path:
    checkpoint = Checkpoint("tiny", "here", "vitserve", "tiny", CONFIG, PREPROCESS, ("a", "b", "c"), tiny())
    native.write(folder, checkpoint, dtype=torch.float32)
    return folder


def timm_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    config = {
        "architecture": "vit_tiny_patch16_224",
        "num_classes": 3,
        "global_pool": "token",
        "label_names": ["a", "b", "c"],
        "model_args": {"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2, "img_size": 16},
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
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tiny(), folder / "model.safetensors")
    return folder


def huggingface_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
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
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    ours = tiny()
    theirs = {
        "vit.embeddings.cls_token": ours["cls_token"],
        "vit.embeddings.position_embeddings": ours["pos_embed"],
        "vit.embeddings.patch_embeddings.projection.weight": ours["patch_embed.proj.weight"],
        "vit.embeddings.patch_embeddings.projection.bias": ours["patch_embed.proj.bias"],
        "vit.layernorm.weight": ours["norm.weight"],
        "vit.layernorm.bias": ours["norm.bias"],
        "classifier.weight": ours["head.weight"],
        "classifier.bias": ours["head.bias"],
    }
    for i in range(2):
        layer, block = f"vit.encoder.layer.{i}.", f"blocks.{i}."
        for kind in ("weight", "bias"):
            for part, tensor in zip(("query", "key", "value"), ours[f"{block}attn.qkv.{kind}"].chunk(3), strict=True):
                theirs[f"{layer}attention.attention.{part}.{kind}"] = tensor.contiguous()
            theirs[f"{layer}attention.output.dense.{kind}"] = ours[f"{block}attn.proj.{kind}"]
            theirs[f"{layer}layernorm_before.{kind}"] = ours[f"{block}norm1.{kind}"]
            theirs[f"{layer}layernorm_after.{kind}"] = ours[f"{block}norm2.{kind}"]
            theirs[f"{layer}intermediate.dense.{kind}"] = ours[f"{block}mlp.fc1.{kind}"]
            theirs[f"{layer}output.dense.{kind}"] = ours[f"{block}mlp.fc2.{kind}"]
    save_file(theirs, folder / "model.safetensors")
    return folder


def adapter_folder(folder: Path, base: str, rank: int = 2, width: int = 16) -> Path:
    """A LoRA adapter, as PEFT saves it, of one layer of `huggingface_folder`."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.vit.encoder.layer.0.attention.attention.query"
    pair = {f"{module}.lora_A.weight": torch.ones(rank, width), f"{module}.lora_B.weight": torch.ones(width, rank)}
    save_file(pair, folder / "adapter_model.safetensors")
    return folder


FOLDERS: dict[str, Callable[[Path], Path]] = {
    "native": native_folder,
    "timm": timm_folder,
    "huggingface": huggingface_folder,
}


def refusal(source: Path, **options: Any) -> str:
    """The one line that this source is refused with."""
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(str(source), **options).build()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert len(message) < 700
    return message


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
