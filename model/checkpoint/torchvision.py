"""torchvision's ViT state dicts (torchvision/models/vision_transformer.py): `vit_b_16` and its siblings.

A state dict does not say how many heads it has; torchvision's five models are told apart by width and
patch. Released files are known by name, which chooses their published preprocessing and labels.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from pydantic import ValidationError
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile, TensorSource
from model.checkpoint.options import PREPROCESS_PRESETS, Options, imagenet_labels
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError, first_problem

FORMAT: Final = "torchvision"


class _Model(NamedTuple):
    depth: int
    heads: int
    mlp_width: int


_MODELS: Final = {768: _Model(12, 12, 3072), 1024: _Model(24, 16, 4096), 1280: _Model(32, 16, 5120)}
_NAMES: Final = {
    (768, 16): "vit_b_16",
    (768, 32): "vit_b_32",
    (1024, 16): "vit_l_16",
    (1024, 32): "vit_l_32",
    (1280, 14): "vit_h_14",
}

_RELEASED: Final = re.compile(r"(vit_[blh]_\d\d)(_lc_swag|_swag)?-[0-9a-f]{8}\.(?:pth|safetensors)")
_PRESETS: Final = {
    ("vit_b_16", None): "torchvision-224",
    ("vit_b_32", None): "torchvision-224",
    ("vit_l_16", None): "torchvision-l16-224",
    ("vit_l_32", None): "torchvision-224",
    ("vit_b_16", "_swag"): "torchvision-swag-384",
    ("vit_l_16", "_swag"): "torchvision-swag-512",
    ("vit_h_14", "_swag"): "torchvision-swag-518",
    ("vit_b_16", "_lc_swag"): "torchvision-swag-linear-224",
    ("vit_l_16", "_lc_swag"): "torchvision-swag-linear-224",
    ("vit_h_14", "_lc_swag"): "torchvision-swag-linear-224",
}
"""Preset of each released file, by the start of its name."""

_LAYER: Final = "encoder.layers.encoder_layer_"


def recognises(files: Files) -> bool:
    """Whether a file's tensors are named as torchvision names a ViT's."""
    if not isinstance(files, SingleFile) or files.file.suffix.lower() == ".npz":
        return False
    return {"class_token", "conv_proj.weight"} <= files.tensors().keys()


def read(files: Files, options: Options) -> Checkpoint:
    """Read a state dict of one of torchvision's models.

    Raises:
        CheckpointError: not one of its sizes, or no preprocessing or labels for it.
    """
    assert isinstance(files, SingleFile)
    where = files.place
    stored = TensorSource(files.tensors(), where)
    config = _config(stored, where)
    name = _NAMES[config.width, config.patch_size]
    if options.architecture not in (None, name):
        raise CheckpointError(f"{where}: is a {name}, not a {options.architecture}")
    preprocess, labels, notes = _published(files, config, name, options)
    checkpoint = Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=config,
        preprocess=preprocess,
        labels=labels,
        tensors=native_tensors(_convert(stored, config), config, where),
        notes=notes,
    )
    stored.finish()
    return checkpoint


def _config(stored: TensorSource, where: str) -> ViTConfig:
    shape = stored.shape("conv_proj.weight")
    if len(shape) != 4 or shape[2] != shape[3] or (shape[0], shape[2]) not in _NAMES:
        known = ", ".join(_NAMES.values())
        raise CheckpointError(f"{where}: conv_proj.weight has shape {list(shape)}: not one of {known}")
    width, channels, patch, _ = shape
    positions = stored.shape("encoder.pos_embedding")
    edge = math.isqrt(max(positions[1] - 1, 0)) if len(positions) == 3 else 0
    if edge < 1 or positions != (1, edge * edge + 1, width):
        raise CheckpointError(f"{where}: encoder.pos_embedding has shape {list(positions)}: no square grid")
    head = stored.shape("heads.head.weight")
    if len(head) != 2:
        raise CheckpointError(f"{where}: heads.head.weight has shape {list(head)}: expected two dimensions")
    model = _MODELS[width]
    try:
        return ViTConfig(
            image_size=(edge * patch, edge * patch),
            patch_size=patch,
            width=width,
            depth=model.depth,
            heads=model.heads,
            mlp_width=model.mlp_width,
            num_classes=head[0],
            in_channels=channels,
        )
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None


def _convert(stored: TensorSource, config: ViTConfig) -> dict[str, Tensor]:
    width, hidden, patch = config.width, config.mlp_width, config.patch_size
    tensors = {
        "cls_token": stored.take("class_token", 1, 1, width),
        "pos_embed": stored.take("encoder.pos_embedding", 1, config.tokens, width),
        "patch_embed.proj.weight": stored.take("conv_proj.weight", width, config.in_channels, patch, patch),
        "patch_embed.proj.bias": stored.take("conv_proj.bias", width),
    }
    for index in range(config.depth):
        layer, to = f"{_LAYER}{index}.", f"blocks.{index}."
        # Files from before torchvision 0.13 name the MLP's layers otherwise.
        old = f"{layer}mlp.linear_1.weight" in stored
        fc1, fc2 = ("mlp.linear_1", "mlp.linear_2") if old else ("mlp.0", "mlp.3")
        tensors |= {
            f"{to}norm1.weight": stored.take(f"{layer}ln_1.weight", width),
            f"{to}norm1.bias": stored.take(f"{layer}ln_1.bias", width),
            f"{to}attn.qkv.weight": stored.take(f"{layer}self_attention.in_proj_weight", 3 * width, width),
            f"{to}attn.qkv.bias": stored.take(f"{layer}self_attention.in_proj_bias", 3 * width),
            f"{to}attn.proj.weight": stored.take(f"{layer}self_attention.out_proj.weight", width, width),
            f"{to}attn.proj.bias": stored.take(f"{layer}self_attention.out_proj.bias", width),
            f"{to}norm2.weight": stored.take(f"{layer}ln_2.weight", width),
            f"{to}norm2.bias": stored.take(f"{layer}ln_2.bias", width),
            f"{to}mlp.fc1.weight": stored.take(f"{layer}{fc1}.weight", hidden, width),
            f"{to}mlp.fc1.bias": stored.take(f"{layer}{fc1}.bias", hidden),
            f"{to}mlp.fc2.weight": stored.take(f"{layer}{fc2}.weight", width, hidden),
            f"{to}mlp.fc2.bias": stored.take(f"{layer}{fc2}.bias", width),
        }
    return tensors | {
        "norm.weight": stored.take("encoder.ln.weight", width),
        "norm.bias": stored.take("encoder.ln.bias", width),
        "head.weight": stored.take("heads.head.weight", config.num_classes, width),
        "head.bias": stored.take("heads.head.bias", config.num_classes),
    }


def _published(
    files: SingleFile, config: ViTConfig, name: str, options: Options
) -> tuple[PreprocessConfig, tuple[str, ...], tuple[str, ...]]:
    """Preprocessing, labels and notes: the operator's choice, or what was published with a released file."""
    notes: list[str] = []
    match = _RELEASED.fullmatch(files.file.name)
    preset = _PRESETS.get((name, match[2])) if match is not None and match[1] == name else None
    if preset is not None and options.preprocess is None:
        notes.append(f"preprocessing: preset {preset}, for the released file {files.file.name}")
    known = preset is not None and config.num_classes == 1000
    if known and options.labels is None:
        notes.append(f"labels: preset imagenet-1k, for the released file {files.file.name}")
    return (
        options.preprocess_or(PREPROCESS_PRESETS[preset] if preset else None, files.place),
        options.labels_or(imagenet_labels() if known else None, config.num_classes, files.place),
        tuple(notes),
    )
