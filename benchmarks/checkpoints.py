"""The models that are measured, as transformers' folders that vitserve and every peer load alike.

(a) `vit32`:   32 px, patch 4, 192 wide, 9 layers, 10 classes; random weights from a seed
(b) `vit224`:  ViT-Ti/16 at 224 px, 1000 classes: DeiT-Tiny's weights where they are at hand, else random
"""

from __future__ import annotations

import json
import os
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
        folder.mkdir(parents=True, exist_ok=True)
        source.write_text(write(folder, shape))
    return folder, source.read_text()


def write(folder: Path, shape: Shape, seed: int = 0) -> str:
    """Write the files of a model into a folder, and return where its weights come from; `seed` is of random ones."""
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    timm = shared_folder() / "weights" / "deit_tiny_imagenet" / "model.safetensors"
    if shape is VIT224 and timm.exists():
        tensors, origin = _from_timm(timm, shape), "deit_tiny_patch16_224 (timm)"
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
        return torch.randn(size, generator=generator) * float(torch.tensor(size[1:]).prod()) ** -0.5

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


def _random(shape: Shape, seed: int) -> dict[str, Tensor]:
    """Weights whose answers differ from picture to picture, so that a mix-up or a rounding would show.

    Transformers' own initialisation answers every picture almost alike; weights of unit gain do not.
    """
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)

    def weight(*size: int) -> Tensor:
        fan_in = int(torch.tensor(size[1:]).prod())
        return torch.randn(size, generator=generator) * float(fan_in**-0.5)

    width, tokens = shape.width, (shape.size // shape.patch) ** 2 + 1
    tensors = {
        "vit.embeddings.cls_token": torch.randn((1, 1, width), generator=generator) * 0.02,
        "vit.embeddings.position_embeddings": torch.randn((1, tokens, width), generator=generator) * 0.1,
        "vit.embeddings.patch_embeddings.projection.weight": weight(width, 3, shape.patch, shape.patch),
        "vit.embeddings.patch_embeddings.projection.bias": torch.zeros(width),
    }
    for index in range(shape.depth):
        for ours, size in _BLOCK.items():
            name = f"vit.encoder.layer.{index}.{ours}"
            if "layernorm" in ours:
                tensors[f"{name}.weight"] = torch.ones(width)
                tensors[f"{name}.bias"] = torch.zeros(width)
            else:
                rows, columns = size[0] * width, size[1] * width
                tensors[f"{name}.weight"] = weight(rows, columns)
                tensors[f"{name}.bias"] = torch.zeros(rows)
    tensors["vit.layernorm.weight"] = torch.ones(width)
    tensors["vit.layernorm.bias"] = torch.zeros(width)
    tensors["classifier.weight"] = 4 * weight(shape.classes, width)
    tensors["classifier.bias"] = torch.zeros(shape.classes)
    return tensors


_BLOCK = {
    "attention.attention.query": (1, 1),
    "attention.attention.key": (1, 1),
    "attention.attention.value": (1, 1),
    "attention.output.dense": (1, 1),
    "intermediate.dense": (4, 1),
    "output.dense": (1, 4),
    "layernorm_before": (1, 1),
    "layernorm_after": (1, 1),
}
"""Parts of a block in transformers' names, with the rows and columns of their weights in widths."""


def _from_timm(file: Path, shape: Shape) -> dict[str, Tensor]:
    """timm's names and fused QKV to transformers' (convert_vit_timm_to_pytorch.py)."""
    from safetensors.torch import load_file  # noqa: PLC0415

    timm = load_file(file)
    tensors = {
        "vit.embeddings.cls_token": timm["cls_token"],
        "vit.embeddings.position_embeddings": timm["pos_embed"],
    }
    renamed = {
        "vit.embeddings.patch_embeddings.projection": "patch_embed.proj",
        "vit.layernorm": "norm",
        "classifier": "head",
    }
    for index in range(shape.depth):
        ours, theirs = f"vit.encoder.layer.{index}", f"blocks.{index}"
        renamed |= {
            f"{ours}.attention.output.dense": f"{theirs}.attn.proj",
            f"{ours}.intermediate.dense": f"{theirs}.mlp.fc1",
            f"{ours}.output.dense": f"{theirs}.mlp.fc2",
            f"{ours}.layernorm_before": f"{theirs}.norm1",
            f"{ours}.layernorm_after": f"{theirs}.norm2",
        }
        for kind in ("weight", "bias"):
            parts = timm[f"{theirs}.attn.qkv.{kind}"].chunk(3)
            for part, tensor in zip(("query", "key", "value"), parts, strict=True):
                tensors[f"{ours}.attention.attention.{part}.{kind}"] = tensor.clone()
    for new, old in renamed.items():
        for kind in ("weight", "bias"):
            tensors[f"{new}.{kind}"] = timm[f"{old}.{kind}"]
    return tensors
