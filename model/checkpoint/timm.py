"""timm's hub layout: a folder with `config.json` (architecture, pretrained_cfg) and its weights.

Source of names and defaults: timm/models/vision_transformer.py, deit.py, vision_transformer_hybrid.py,
_hub.py, and timm/data/transforms_factory.py. `timm_architectures.json` holds what each architecture's
entry point passes to the model class, so that a name alone says the whole architecture; models built
of other parts (rotary positions, parallel blocks, other norms) are refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.options import CheckpointOptions, imagenet_labels
from model.checkpoint.refusals import required, validating
from model.checkpoint.resizing import resized_config, resized_positions
from model.checkpoint.tensors import fuse_pairs
from model.config import Activation, Pool, PreprocessConfig, ResNetStem, Size, ViTConfig
from model.errors import CheckpointError

FORMAT: Final = "timm"

_RESIZE: Final = {"center": "shortest_edge", "squash": "squash", "border": "border"}
_POOL: Final[dict[str, Pool]] = {
    "token": "cls",
    "avg": "mean",
    "max": "max",
    "avgmax": "mean_max",
    "map": "attention",
}
_UNUSED_ARGS: Final = frozenset({"weight_init", "fix_init", "strict_img_size"})
"""Arguments that change training or checks, never an answer."""


def _pair(value: Any) -> Any:
    return (value, value) if type(value) is int else value


class TimmArguments(BaseModel):
    """Arguments of timm's `VisionTransformer`, with that class's own defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    img_size: Annotated[Size, BeforeValidator(_pair)]
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)]
    in_chans: Annotated[int, Field(ge=1, le=4)] = 3
    patch_size: Annotated[int, Field(ge=1, le=1024)] = 16
    global_pool: Literal["token", "avg", "max", "avgmax", "map"] = "token"
    embed_dim: Annotated[int, Field(ge=1, le=16384)] = 768
    depth: Annotated[int, Field(ge=1, le=256)] = 12
    num_heads: Annotated[int, Field(ge=1, le=256)] = 12
    mlp_ratio: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] = 4.0
    qkv_bias: bool = True
    qk_norm: bool = False
    proj_bias: bool = True
    init_values: Annotated[float, Field(allow_inf_nan=False)] | None = None
    class_token: bool = True
    pos_embed: Literal["learn", "none", ""] = "learn"
    no_embed_class: bool = False
    reg_tokens: Annotated[int, Field(ge=0, le=1024)] = 0
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool | None = None
    pool_include_prefix: bool = False
    dynamic_img_size: bool = False
    """Whether the model resizes its own positions to the input."""
    norm_layer: Literal["layernorm"] | None = None
    act_layer: Activation | None = None
    # Not timm's own names: what its entry points pass as Python objects.
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    mlp_layer: Literal["SwiGLU", "SwiGLUPacked"] | None = None
    distilled: bool = False
    stem_layers: tuple[int, ...] | None = None

    def vit_config(self) -> ViTConfig:
        """Return the same architecture in this project's terms.

        Raises:
            pydantic.ValidationError: arguments that timm would refuse too, or beyond this project's limits.
        """
        pool = _POOL[self.global_pool]
        fc_norm = pool in ("mean", "max", "mean_max") if self.fc_norm is None else self.fc_norm
        stem = None if self.stem_layers is None else ResNetStem(layers=self.stem_layers)
        patch = self.patch_size * (1 if stem is None else stem.stride)
        rows, columns = self.img_size
        hidden = int(self.embed_dim * self.mlp_ratio)
        return ViTConfig(
            image_size=self.img_size,
            patch_size=patch,
            width=self.embed_dim,
            depth=self.depth,
            heads=self.num_heads,
            mlp_width=hidden // 2 if self.mlp_layer == "SwiGLUPacked" else hidden,
            num_classes=self.num_classes,
            in_channels=self.in_chans,
            drop_remainder=bool(rows % patch or columns % patch),
            stem=stem,
            patch_bias=not self.pre_norm,
            position_embedding="learned" if self.pos_embed == "learn" else "none",
            position_prefix=not self.no_embed_class,
            class_token=self.class_token,
            distillation_token=self.distilled,
            registers=self.reg_tokens,
            norm_before_blocks=self.pre_norm,
            norm_eps=self.norm_eps,
            qkv_bias=self.qkv_bias,
            projection_bias=self.proj_bias,
            qk_norm=self.qk_norm,
            mlp="plain" if self.mlp_layer is None else "swiglu",
            activation=self.act_layer or ("gelu" if self.mlp_layer is None else "silu"),
            layer_scale=bool(self.init_values),
            pool=pool,
            pool_prefix=self.pool_include_prefix,
            final_norm=self.final_norm,
            norm_after_pool=self.final_norm and fc_norm,
            distillation_head=self.distilled,
        )


@cache
def architectures() -> Mapping[str, dict[str, Any]]:
    """Return what each of timm's entry points passes to its model class, by architecture."""
    text = resources.files("model.checkpoint").joinpath("timm_architectures.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def architecture_arguments(name: str, where: str) -> dict[str, Any]:
    """Return the arguments of an architecture by timm's name.

    Raises:
        CheckpointError: no architecture of this name that is read here.
    """
    if name not in architectures():
        raise CheckpointError(f"{where}: architecture {name!r} is not one this version reads")
    return dict(architectures()[name])


def rename(tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Return tensors without the few names and layouts in which timm's models differ from this project's one model."""
    renamed = dict(tensors)
    if config.stem is not None and not config.stem.layers:
        # A root without stages is timm's whole backbone.
        for name in [n for n in renamed if n.startswith(("patch_embed.backbone.conv.", "patch_embed.backbone.norm."))]:
            renamed[name.replace("backbone.", "backbone.stem.", 1)] = renamed.pop(name)
    if config.mlp == "swiglu":
        fuse_pairs(renamed, ".mlp.fc1_g.", ".mlp.fc1_x.", ".mlp.fc1.")
    return renamed


def recognises(files: Files) -> bool:
    """Return whether a folder's `config.json` is timm's."""
    config = files.config
    return config is not None and isinstance(config.get("architecture"), str) and "pretrained_cfg" in config


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a folder as timm's `save_for_hf` and `push_to_hf_hub` write it.

    Raises:
        CheckpointError: an architecture or option this reader does not know, or a missing field.
    """
    where = files.where(CONFIG_FILE)
    config = files.config
    assert config is not None
    options.refuse_architecture(where)
    name = config["architecture"]
    pretrained = config["pretrained_cfg"]
    if not isinstance(pretrained, dict):
        raise CheckpointError(f"{where}: pretrained_cfg: expected an object")
    arguments = _arguments(where, config, pretrained)
    with validating(where):
        vit = arguments.vit_config()
    size = _input_size(where, pretrained)[1:]
    if size != vit.image_size and not arguments.dynamic_img_size:
        raise CheckpointError(f"{where}: pretrained_cfg.input_size {size} disagrees with img_size {vit.image_size}")
    preprocess = options.preprocess_or(None if options.preprocess else _preprocess(where, pretrained), where)
    labels, notes = _labels(where, config, pretrained, vit.num_classes, options)
    tensors = native_tensors(rename(files.tensors(), vit), vit, files.place)
    if size != vit.image_size:
        # What timm's `dynamic_img_size` does at each forward pass is done once.
        old, vit = vit, resized_config(vit, size, files.source)
        tensors = resized_positions(tensors, old, vit)
    return Checkpoint(
        name=_name(name, pretrained),
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=vit,
        preprocess=preprocess,
        labels=labels,
        tensors=tensors,
        revision=files.revision,
        notes=notes,
    )


def _name(architecture: str, pretrained: dict[str, Any]) -> str:
    tag = pretrained.get("tag")
    return f"{architecture}.{tag}" if isinstance(tag, str) and tag else architecture


def _arguments(where: str, config: dict[str, Any], pretrained: dict[str, Any]) -> TimmArguments:
    """Return the architecture's own arguments, overridden by what the config says."""
    arguments = architecture_arguments(config["architecture"], where)
    given = config.get("model_args") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: model_args: expected an object")
    in_chans, *size = _input_size(where, pretrained)
    arguments |= {"img_size": tuple(size), "in_chans": in_chans}
    arguments |= {key: value for key, value in given.items() if key not in _UNUSED_ARGS}
    for key in ("num_classes", "global_pool"):
        value = required(config, key, where)
        if given.get(key, value) != value:
            raise CheckpointError(f"{where}: {key} is {value!r}, but {given[key]!r} in model_args")
        arguments[key] = value
    if arguments["num_classes"] == 0:
        raise CheckpointError(f"{where}: num_classes is 0: a backbone without a classification head")
    with validating(where):
        return TimmArguments.model_validate(arguments)


def _preprocess(where: str, pretrained: dict[str, Any]) -> PreprocessConfig:
    _, rows, columns = _input_size(where, pretrained)
    crop_pct = required(pretrained, "crop_pct", where)
    if not isinstance(crop_pct, int | float) or isinstance(crop_pct, bool) or not 0.01 <= crop_pct <= 1:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_pct {crop_pct!r}: expected a number above 0, at most 1")
    crop_mode = required(pretrained, "crop_mode", where)
    if not isinstance(crop_mode, str) or crop_mode not in _RESIZE:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_mode {crop_mode!r}: expected one of {sorted(_RESIZE)}")
    if pretrained.get("crop_border_pixels"):
        raise CheckpointError(f"{where}: pretrained_cfg.crop_border_pixels is not read by this version")
    fields = {
        "size": (rows, columns),
        "resize": _RESIZE[crop_mode],
        # Truncated as timm does it: math.floor(x / crop_pct).
        "resize_size": (math.floor(rows / crop_pct), math.floor(columns / crop_pct)),
    }
    fields |= {key: required(pretrained, key, where) for key in ("interpolation", "mean", "std")}
    with validating(where, "pretrained_cfg."):
        return PreprocessConfig.model_validate(fields)


def _labels(
    where: str, config: dict[str, Any], pretrained: dict[str, Any], classes: int, options: CheckpointOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return labels and notes: human descriptions where the config has them, else its label names.

    timm's own ImageNet-1k checkpoints carry none; their tag says what they were trained on.
    """
    if options.labels is not None:
        return options.labels_or(None, classes, where), ()
    names = config.get("label_names") or pretrained.get("label_names")
    tag = pretrained.get("tag")
    if names is None and classes == 1000 and isinstance(tag, str) and tag.endswith("in1k"):
        return imagenet_labels(), (f"labels: preset imagenet-1k, for its tag {tag!r}",)
    if names is None:
        return options.labels_or(None, classes, f"{where}: label_names is missing"), ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: label_names: expected a list of {classes} strings")
    descriptions = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    if not isinstance(descriptions, dict) or not all(isinstance(d, str) for d in descriptions.values()):
        raise CheckpointError(f"{where}: label_descriptions: expected an object of strings")
    return tuple(str(descriptions.get(name, name)) for name in names), ()


def _input_size(where: str, pretrained: dict[str, Any]) -> tuple[int, int, int]:
    size = required(pretrained, "input_size", where)
    if not isinstance(size, list) or len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"{where}: pretrained_cfg.input_size {size!r:.100}: expected [channels, rows, columns]")
    channels, rows, columns = size
    return channels, rows, columns
