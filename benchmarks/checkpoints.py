"""The measured models, as transformers' folders that vitserve and every peer load alike.

(a) `vit32`:   32 px, patch 4, 192 wide, 9 layers, 10 classes; random weights from a seed
(b) `vit224`:  ViT-Ti/16 at 224 px, 1000 classes: DeiT-Tiny's weights if available, else random
"""

import functools
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("VITSERVE_BENCHMARK_CACHE", REPOSITORY / "benchmarks" / ".cache"))


@dataclass(frozen=True)
class Shape:
    """What a model looks like, and how pictures are made to fit it.

    Attributes:
        resize: pixels of the shorter edge before the centre crop, with ImageNet's statistics; None
        squashes to `size`.
    """

    name: str
    size: int
    patch: int
    width: int
    depth: int
    heads: int
    classes: int
    resize: int | None = None


VIT32 = Shape("vit32", 32, 4, 192, 9, 3, 10)
VIT224 = Shape("vit224", 224, 16, 192, 12, 3, 1000, 248)
SHAPES = {shape.name: shape for shape in (VIT32, VIT224)}


def shared_folder() -> Path:
    """Return the folder of real checkpoints: `VIT_SHARED`, or `shared` next to the repository."""
    return Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared"))


def ensure(shape: Shape) -> tuple[Path, str]:
    """The folder of a model, made if absent, and where its weights come from."""
    folder = CACHE / shape.name
    source = folder / "SOURCE"
    if not source.exists():
        source.write_text(write(folder, shape))
    return folder, source.read_text()


def write(folder: Path, shape: Shape, seed: int = 0) -> str:
    """Write the files of a model into a folder, and return where its weights come from; `seed` is
    of random ones.
    """
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    timm = shared_folder() / "weights" / "deit_tiny_imagenet" / "model.safetensors"
    if shape is VIT224 and timm.exists():
        tensors = load_file(timm)
        origin = "deit_tiny_patch16_224 (timm)"
    else:
        tensors = _random(shape, seed)
        origin = f"random, seed {seed}"
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor(shape), indent=1))
    save_file(_renamed(tensors), folder / "model.safetensors", metadata={"format": "pt"})
    return origin


def write_clip(folder: Path) -> None:
    """Write a CLIP of two random towers, ViT-S/32 and the text tower of CLIP's size, with a token a
    letter.
    """
    import torch  # noqa: PLC0415
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415

    # Towers need no torchvision, whose operators may be built for another torch: transformers goes
    # without.
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    from transformers import CLIPConfig, CLIPModel, CLIPTokenizer  # noqa: PLC0415

    letters = sorted(ByteLevel.alphabet())
    tokens = [
        *letters,
        *(f"{letter}</w>" for letter in letters),
        "<|startoftext|>",
        "<|endoftext|>",
    ]
    CLIPTokenizer(
        vocab={token: number for number, token in enumerate(tokens)}, merges=[]
    ).save_pretrained(folder)
    text = {"vocab_size": len(tokens), "eos_token_id": len(tokens) - 1}
    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=512))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    torch.nn.init.constant_(model.logit_scale, 4.0)
    model.save_pretrained(folder)
    processor = _preprocessor(VIT224) | {"image_processor_type": "CLIPImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["ViTForImageClassification"],
        "model_type": "vit",
        "image_size": shape.size,
        "patch_size": shape.patch,
        "num_channels": 3,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "intermediate_size": 4 * shape.width,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "id2label": {str(index): f"class {index}" for index in range(shape.classes)},
        "label2id": {f"class {index}": index for index in range(shape.classes)},
    }


def _preprocessor(shape: Shape) -> dict[str, Any]:
    square = {"height": shape.size, "width": shape.size}
    half = [0.5, 0.5, 0.5]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": square if shape.resize is None else {"shortest_edge": shape.resize},
        "do_center_crop": shape.resize is not None,
        "crop_size": square,
        "resample": 2 if shape.resize is None else 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": half if shape.resize is None else [0.485, 0.456, 0.406],
        "image_std": half if shape.resize is None else [0.229, 0.224, 0.225],
    }


def _random(shape: Shape, seed: int) -> dict[str, Any]:
    """Weights in timm's names whose answers differ from picture to picture, so that a mix-up or a
    rounding would show.

    Transformers' own initialisation answers every picture almost alike; weights of unit gain do
    not.
    """
    import torch  # noqa: PLC0415

    from model.config import ViTConfig  # noqa: PLC0415
    from model.network.vit import VisionTransformer  # noqa: PLC0415

    config = ViTConfig(
        image_size=(shape.size, shape.size),
        patch_size=shape.patch,
        width=shape.width,
        depth=shape.depth,
        heads=shape.heads,
        mlp_width=4 * shape.width,
        num_classes=shape.classes,
    )
    tensors = VisionTransformer(config).state_dict()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            gain = {"cls_token": 0.3, "pos_embed": 1.4, "head.weight": 4.0}.get(name, 1.0)
            size = shape.width if "pos" in name else tensor[0].numel()
            tensor.normal_(std=gain * size**-0.5, generator=generator)
        else:
            tensor.fill_("norm" in name and name.endswith("weight"))
    return tensors


_FROM_TIMM = {
    r"^(cls_token)$": r"vit.embeddings.\1",
    r"^pos_embed$": "vit.embeddings.position_embeddings",
    r"^patch_embed\.proj": "vit.embeddings.patch_embeddings.projection",
    r"^blocks\.": "vit.encoder.layer.",
    r"\.attn\.proj\.": ".attention.output.dense.",
    r"\.mlp\.fc1\.": ".intermediate.dense.",
    r"\.mlp\.fc2\.": ".output.dense.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"^norm\.": "vit.layernorm.",
    r"^head\.": "classifier.",
}


def _renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """timm's names and fused QKV to transformers' (convert_vit_timm_to_pytorch.py)."""
    found = {}
    for old, tensor in tensors.items():
        name: str = functools.reduce(
            lambda name, pair: re.sub(pair[0], pair[1], name), _FROM_TIMM.items(), old
        )
        parts = ("query", "key", "value") if ".attn.qkv." in name else ("",)
        for part, each in zip(parts, tensor.chunk(len(parts)), strict=True):
            found[name.replace(".attn.qkv.", f".attention.attention.{part}.")] = each.clone()
    return found
