"""timm's hub layout: a folder with `config.json` (architecture, pretrained_cfg) and `model.safetensors`.

Source of names and defaults: timm/models/vision_transformer.py, timm/models/_hub.py and
timm/data/transforms_factory.py. Only plain ViT and DeiT are read; anything else is refused by name.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.files import CONFIG_FILE, WEIGHTS_FILE, first_problem, read_safetensors
from model.config import SIZES, PreprocessConfig, ViTConfig
from model.errors import CheckpointError

FORMAT = "timm"

_ARCHITECTURE = re.compile(r"(?:vit|deit)_(tiny|small|base|large|huge)_patch(\d{1,4})_(\d{1,5})")
_RESIZE = {"center": "shortest_edge", "squash": "squash"}


def recognises(config: dict[str, Any]) -> bool:
    """Whether a folder's `config.json` is timm's."""
    return isinstance(config.get("architecture"), str) and "pretrained_cfg" in config


def read(folder: Path, config: dict[str, Any], source: str) -> Checkpoint:
    """Read a folder as timm's `save_for_hf` and `push_to_hf_hub` write it.

    Raises:
        CheckpointError: an architecture or option this reader does not know, or a missing field.
    """
    where = folder / CONFIG_FILE
    architecture = config["architecture"]
    pretrained = config["pretrained_cfg"]
    if not isinstance(pretrained, dict):
        raise CheckpointError(f"{where}: pretrained_cfg: expected an object")
    tensors = read_safetensors(folder / WEIGHTS_FILE)
    vit = _architecture(where, config, pretrained, tensors)
    return Checkpoint(
        name=_name(architecture, pretrained),
        source=source,
        format=FORMAT,
        architecture=architecture,
        config=vit,
        preprocess=_preprocess(where, pretrained),
        labels=_labels(where, config, vit.num_classes),
        tensors=tensors,
    )


def _name(architecture: str, pretrained: dict[str, Any]) -> str:
    tag = pretrained.get("tag")
    return f"{architecture}.{tag}" if isinstance(tag, str) and tag else architecture


def _architecture(
    where: Path, config: dict[str, Any], pretrained: dict[str, Any], tensors: dict[str, Tensor]
) -> ViTConfig:
    name = config["architecture"]
    match = _ARCHITECTURE.fullmatch(name)
    if match is None:
        raise CheckpointError(f"{where}: architecture {name!r} is not one this version reads")
    if config.get("model_args"):
        raise CheckpointError(f"{where}: model_args {sorted(config['model_args'])} are not read by this version")
    pool = _required(where, config, "global_pool")
    if pool not in ("token", "avg"):
        raise CheckpointError(f"{where}: global_pool {pool!r}: expected 'token' or 'avg'")
    channels, *size = _input_size(where, pretrained)
    sizes = SIZES[match[1]]
    try:
        return ViTConfig(
            image_size=(size[0], size[1]),
            patch_size=int(match[2]),
            in_channels=channels,
            num_classes=_required(where, config, "num_classes"),
            pool="cls" if pool == "token" else "mean",
            # timm moves the final norm behind the pooling when it averages (`use_fc_norm`).
            norm_after_pool=pool == "avg",
            qkv_bias="blocks.0.attn.qkv.bias" in tensors,
            **sizes,
        )
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None


def _preprocess(where: Path, pretrained: dict[str, Any]) -> PreprocessConfig:
    _, rows, columns = _input_size(where, pretrained)
    crop_pct = _required(where, pretrained, "crop_pct")
    if not isinstance(crop_pct, int | float) or isinstance(crop_pct, bool) or not 0 < crop_pct <= 1:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_pct {crop_pct!r}: expected a number above 0, at most 1")
    crop_mode = _required(where, pretrained, "crop_mode")
    if crop_mode not in _RESIZE:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_mode {crop_mode!r}: expected one of {sorted(_RESIZE)}")
    try:
        return PreprocessConfig.model_validate(
            {
                "size": (rows, columns),
                "resize": _RESIZE[crop_mode],
                # Truncated as timm does it: math.floor(x / crop_pct).
                "resize_size": (math.floor(rows / crop_pct), math.floor(columns / crop_pct)),
                "interpolation": _required(where, pretrained, "interpolation"),
                "mean": _required(where, pretrained, "mean"),
                "std": _required(where, pretrained, "std"),
            }
        )
    except ValidationError as error:
        raise CheckpointError(f"{where}: pretrained_cfg.{first_problem(error)}") from None


def _labels(where: Path, config: dict[str, Any], classes: int) -> tuple[str, ...]:
    """Human descriptions where the config has them, else its label names."""
    names = _required(where, config, "label_names")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: label_names: expected a list of {classes} strings")
    descriptions = config.get("label_descriptions") or {}
    if not isinstance(descriptions, dict):
        raise CheckpointError(f"{where}: label_descriptions: expected an object")
    return tuple(str(descriptions.get(name, name)) for name in names)


def _input_size(where: Path, pretrained: dict[str, Any]) -> tuple[int, int, int]:
    size = _required(where, pretrained, "input_size")
    if not isinstance(size, list) or len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"{where}: pretrained_cfg.input_size {size!r}: expected [channels, rows, columns]")
    channels, rows, columns = size
    return channels, rows, columns


def _required(where: Path, mapping: dict[str, Any], key: str) -> Any:
    if mapping.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing")
    return mapping[key]
