"""The models that are measured, as transformers' folders that vitserve and every peer load alike.

(a) `vit32`:   32 px, patch 4, 192 wide, 9 layers, 10 classes; random weights from a seed
(b) `vit224`:  ViT-Ti/16 at 224 px, 1000 classes: DeiT-Tiny's weights where they are at hand, else random
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

REPOSITORY = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("VITSERVE_BENCHMARK_CACHE", REPOSITORY / "benchmarks" / ".cache"))


@dataclass(frozen=True)
class Shape:
    """What a model looks like, and how pictures are made to fit it.

    Attributes:
        resize: pixels of the shorter edge before the centre crop; None squashes to `size`.
        resample: PIL's number of the filter.
    """

    name: str
    size: int
    patch: int
    width: int
    depth: int
    heads: int
    classes: int
    resize: int | None
    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


VIT32 = Shape("vit32", 32, 4, 192, 9, 3, 10, None, 2, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
VIT224 = Shape("vit224", 224, 16, 192, 12, 3, 1000, 248, 3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SHAPES = {shape.name: shape for shape in (VIT32, VIT224)}


def shared_folder() -> Path:
    """Where real checkpoints and pictures may be: `VIT_SHARED`, or `shared` beside the repository."""
    return Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared"))


def ensure(name: str) -> tuple[Path, str]:
    """The folder of a model, made if absent, and where its weights come from."""
    shape = SHAPES[name]
    folder = CACHE / name
    source = folder / "SOURCE"
    if not source.exists():
        source.write_text(write(folder, shape))
    return folder, source.read_text()


def write(folder: Path, shape: Shape, seed: int = 0) -> str:
    """Write the files of a model into a folder, and return where its weights come from; `seed` is of random ones."""
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    timm = shared_folder() / "weights" / "deit_tiny_imagenet" / "model.safetensors"
    if shape is VIT224 and timm.exists():
        tensors, origin = _from_timm(timm), "deit_tiny_patch16_224 (timm)"
    else:
        tensors, origin = _random(shape, seed), f"random, seed {seed}"
    (folder / "config.json").write_text(json.dumps(_config(shape), indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps(_preprocessor(shape), indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return origin


def write_clip(folder: Path) -> None:
    """Write a CLIP of two random towers, ViT-S/32 and the text tower of CLIP's size, with a token a letter."""
    import torch  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415
    from tokenizers.pre_tokenizers import ByteLevel  # noqa: PLC0415
    from transformers import CLIPTokenizer  # noqa: PLC0415

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=[]).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def weight(*size: int) -> Tensor:
        return torch.randn(size, generator=generator) / math.sqrt(math.prod(size[1:]))

    tensors = {"logit_scale": torch.tensor(4.0)}
    towers = {"text": (512, 8, 77), "vision": (384, 6, 50)}
    for tower, (width, _, positions) in towers.items():
        tensors[f"{tower}_model.embeddings.position_embedding.weight"] = weight(positions, width)
        tensors[f"{'visual' if tower == 'vision' else tower}_projection.weight"] = weight(512, width)
        blocks = [f"encoder.layers.{index}." for index in range(12)]
        parts = [f"{block}{part}" for block in blocks for part in _CLIP_BLOCK]
        for part in [*parts, *(("final_layer_norm",) if tower == "text" else ("pre_layrnorm", "post_layernorm"))]:
            rows, columns = _CLIP_BLOCK.get(part.rpartition("layers.")[2].partition(".")[2], (1, 0))
            linear = weight(rows * width, columns * width) if columns else torch.ones(width)
            tensors |= {f"{tower}_model.{part}.weight": linear, f"{tower}_model.{part}.bias": torch.zeros(rows * width)}
    tensors["text_model.embeddings.token_embedding.weight"] = weight(len(tokens), 512)
    tensors["vision_model.embeddings.class_embedding"] = torch.zeros(384)
    tensors["vision_model.embeddings.patch_embedding.weight"] = weight(384, 3, 32, 32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {"architectures": ["CLIPModel"], "model_type": "clip", "projection_dim": 512}
    for tower, (width, heads, _) in towers.items():
        sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": heads}
        config[f"{tower}_config"] = sizes | {"num_hidden_layers": 12}
    config["text_config"] |= {"vocab_size": len(tokens), "eos_token_id": len(tokens) - 1}
    (folder / "config.json").write_text(json.dumps(config))
    square = {"height": 224, "width": 224}
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224}, "crop_size": square}
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3, "resample": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | statistics))


_CLIP_BLOCK = {
    **{f"self_attn.{each}_proj": (1, 1) for each in ("q", "k", "v", "out")},
    "mlp.fc1": (4, 1),
    "mlp.fc2": (1, 4),
    "layer_norm1": (1, 0),
    "layer_norm2": (1, 0),
}
"""Parts of a block in CLIP's names, with the rows and columns of their weights in widths; norms have no columns."""


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
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": square if shape.resize is None else {"shortest_edge": shape.resize},
        "do_center_crop": shape.resize is not None,
        "crop_size": square,
        "resample": shape.resample,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(shape.mean),
        "image_std": list(shape.std),
    }


_LINEAR = {
    "attention.attention.query": (1, 1),
    "attention.attention.key": (1, 1),
    "attention.attention.value": (1, 1),
    "attention.output.dense": (1, 1),
    "intermediate.dense": (4, 1),
    "output.dense": (1, 4),
}
"""Parts of a block in transformers' names, with the rows and columns of their weights in widths."""


def _random(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Weights whose answers differ from picture to picture, so that a mix-up or a rounding would show.

    Transformers' own initialisation answers every picture almost alike; weights of unit gain do not.
    """
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    width, tokens = shape.width, (shape.size // shape.patch) ** 2 + 1
    tensors = {
        "vit.embeddings.cls_token": torch.randn((1, 1, width), generator=generator) * 0.02,
        "vit.embeddings.position_embeddings": torch.randn((1, tokens, width), generator=generator) * 0.1,
    }
    blocks = [f"vit.encoder.layer.{index}" for index in range(shape.depth)]
    sizes: dict[str, tuple[int, ...]] = {
        "vit.embeddings.patch_embeddings.projection": (width, 3, shape.patch, shape.patch)
    }
    sizes |= {f"{block}.{part}": (r * width, c * width) for block in blocks for part, (r, c) in _LINEAR.items()}
    for name, size in (sizes | {"classifier": (shape.classes, width)}).items():
        gain = (4 if name == "classifier" else 1) * float(math.prod(size[1:]) ** -0.5)
        tensors[f"{name}.weight"] = torch.randn(size, generator=generator) * gain
        tensors[f"{name}.bias"] = torch.zeros(size[0])
    for name in ["vit.layernorm", *(f"{block}.layernorm_{where}" for block in blocks for where in ("before", "after"))]:
        tensors |= {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}
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


def _from_timm(file: Path) -> dict[str, Tensor]:
    """timm's names and fused QKV to transformers' (convert_vit_timm_to_pytorch.py)."""
    from safetensors.torch import load_file  # noqa: PLC0415

    tensors = {}
    for old, tensor in load_file(file).items():
        name: str = functools.reduce(lambda name, pair: re.sub(pair[0], pair[1], name), _FROM_TIMM.items(), old)
        parts = ("query", "key", "value") if ".attn.qkv." in name else ("",)
        for part, each in zip(parts, tensor.chunk(len(parts)), strict=True):
            tensors[name.replace(".attn.qkv.", f".attention.attention.{part}.")] = each.clone()
    return tensors
