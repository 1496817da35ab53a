"""torchvision's ViT state dicts (torchvision/models/vision_transformer.py): `vit_b_16` and its siblings.

A state dict does not say how many heads it has; torchvision's five models differ in width and
patch. Released files are known by name, which chooses their published preprocessing and labels.
"""

from __future__ import annotations

import math
import re
from typing import Final

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.refusals import validating
from model.checkpoint.tensors import Names, TensorSource, take_model
from model.config import SIZES, ViTConfig
from model.errors import CheckpointError

FORMAT: Final = "torchvision"

_SIZES: Final = {size["width"]: size for size in SIZES.values()}
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

_LAYER: Final = "encoder.layers.encoder_layer_{}"
_TENSOR_NAMES: Final[Names] = {
    "cls_token": "class_token",
    "pos_embed": "encoder.pos_embedding",
    "patch_embed.proj": "conv_proj",
    "blocks.{}.norm1": f"{_LAYER}.ln_1",
    "blocks.{}.attn.qkv.weight": f"{_LAYER}.self_attention.in_proj_weight",
    "blocks.{}.attn.qkv.bias": f"{_LAYER}.self_attention.in_proj_bias",
    "blocks.{}.attn.proj": f"{_LAYER}.self_attention.out_proj",
    "blocks.{}.norm2": f"{_LAYER}.ln_2",
    "blocks.{}.mlp.fc1": f"{_LAYER}.mlp.0",
    "blocks.{}.mlp.fc2": f"{_LAYER}.mlp.3",
    "norm": "encoder.ln",
    "head": "heads.head",
}
_OLD_MLP_NAMES: Final = {
    "blocks.{}.mlp.fc1": f"{_LAYER}.mlp.linear_1",
    "blocks.{}.mlp.fc2": f"{_LAYER}.mlp.linear_2",
}
"""Those of files from before torchvision 0.13."""


def recognises(files: Files) -> bool:
    """Return whether a file's tensors are named as torchvision names a ViT's."""
    if not isinstance(files, SingleFile) or files.file.suffix.lower() == ".npz":
        return False
    return {"class_token", "conv_proj.weight"} <= files.tensors().keys()


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a state dict of one of torchvision's models."""
    assert isinstance(files, SingleFile)
    where = files.place
    stored = TensorSource(files.tensors(), where)
    config = _config(stored)
    name = _NAMES[config.width, config.patch_size]
    if options.architecture not in (None, name):
        raise CheckpointError(f"{where}: is a {name}, not a {options.architecture}")
    match = _RELEASED.fullmatch(files.file.name)
    preset = _PRESETS.get((name, match[2])) if match is not None and match[1] == name else None
    preprocess, labels, assumed = options.published(files.file, preset, config.num_classes)
    old = f"{_LAYER.format(0)}.mlp.linear_1.weight" in stored
    tensors = take_model(stored, config, {**_TENSOR_NAMES, **_OLD_MLP_NAMES} if old else _TENSOR_NAMES)
    checkpoint = Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=config,
        preprocess=preprocess,
        labels=labels,
        tensors=native_tensors(tensors, config, where),
        assumed=assumed,
    )
    stored.finish()
    return checkpoint


def _config(stored: TensorSource) -> ViTConfig:
    where = stored.where
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
    image = {"image_size": (edge * patch, edge * patch), "patch_size": patch, "in_channels": channels}
    with validating(where):
        return ViTConfig.model_validate({**_SIZES[width], **image, "num_classes": head[0]})
