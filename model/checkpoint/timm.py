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

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors, resized_config
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.options import Options, imagenet_labels
from model.config import Activation, Pool, PreprocessConfig, ResNetStem, Size, ViTConfig
from model.errors import CheckpointError, first_problem
from model.network.vit import resize_position_embedding

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
        """The same architecture in this project's terms.

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
    """What each of timm's entry points passes to its model class, by architecture."""
    text = resources.files("model.checkpoint").joinpath("timm_architectures.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def architecture_arguments(name: str, where: str) -> dict[str, Any]:
    """The arguments of an architecture by timm's name.

    Raises:
        CheckpointError: no architecture of this name that is read here.
    """
    if name not in architectures():
        raise CheckpointError(f"{where}: architecture {name!r} is not one this version reads")
    return dict(architectures()[name])


def rename(tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """The few names and layouts in which timm's models differ from this project's one model."""
    renamed = dict(tensors)
    if config.stem is not None and not config.stem.layers:
        # A root without stages is timm's whole backbone.
        for name in [n for n in renamed if n.startswith(("patch_embed.backbone.conv.", "patch_embed.backbone.norm."))]:
            renamed[name.replace("backbone.", "backbone.stem.", 1)] = renamed.pop(name)
    if config.mlp == "swiglu":
        for name in [n for n in renamed if ".mlp.fc1_g." in n]:
            other = name.replace("fc1_g", "fc1_x")
            if other in renamed and renamed[other].shape == renamed[name].shape:
                renamed[name.replace("fc1_g", "fc1")] = torch.cat((renamed.pop(name), renamed.pop(other)))
    return renamed


def recognises(files: Files) -> bool:
    """Whether a folder's `config.json` is timm's."""
    config = files.config
    return config is not None and isinstance(config.get("architecture"), str) and "pretrained_cfg" in config


def read(files: Files, options: Options) -> Checkpoint:
    """Read a folder as timm's `save_for_hf` and `push_to_hf_hub` write it.

    Raises:
        CheckpointError: an architecture or option this reader does not know, or a missing field.
    """
    where = files.where(CONFIG_FILE)
    config = files.config
    assert config is not None
    if options.architecture is not None:
        raise CheckpointError(f"{where}: says its own architecture; VIT_ARCHITECTURE is for plain state dicts")
    name = config["architecture"]
    pretrained = config["pretrained_cfg"]
    if not isinstance(pretrained, dict):
        raise CheckpointError(f"{where}: pretrained_cfg: expected an object")
    arguments = _arguments(where, config, pretrained)
    try:
        vit = arguments.vit_config()
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None
    size = _input_size(where, pretrained)[1:]
    if size != vit.image_size and not arguments.dynamic_img_size:
        raise CheckpointError(f"{where}: pretrained_cfg.input_size {size} disagrees with img_size {vit.image_size}")
    preprocess = options.preprocess_or(None if options.preprocess else _preprocess(where, pretrained), where)
    labels, notes = _labels(where, config, pretrained, vit.num_classes, options)
    tensors = native_tensors(rename(files.tensors(), vit), vit, files.place)
    if size != vit.image_size:
        vit, tensors = _at_input_size(vit, tensors, size, files.source)
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
    """The architecture's own arguments, and over them what the config says."""
    arguments = architecture_arguments(config["architecture"], where)
    given = config.get("model_args") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: model_args: expected an object")
    in_chans, *size = _input_size(where, pretrained)
    arguments |= {"img_size": tuple(size), "in_chans": in_chans}
    arguments |= {key: value for key, value in given.items() if key not in _UNUSED_ARGS}
    for key in ("num_classes", "global_pool"):
        value = _required(where, config, key)
        if given.get(key, value) != value:
            raise CheckpointError(f"{where}: {key} is {value!r}, but {given[key]!r} in model_args")
        arguments[key] = value
    if arguments["num_classes"] == 0:
        raise CheckpointError(f"{where}: num_classes is 0: a backbone without a classification head")
    try:
        return TimmArguments.model_validate(arguments)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None


def _at_input_size(
    config: ViTConfig, tensors: dict[str, Tensor], size: Size, source: str
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """What timm's `dynamic_img_size` does at each forward pass, once."""
    new = resized_config(config, size, source)
    tensors["pos_embed"] = resize_position_embedding(
        tensors["pos_embed"],
        prefix_tokens=config.prefix_tokens if config.position_prefix else 0,
        old_grid=config.grid,
        new_grid=new.grid,
    )
    return new, tensors


def _preprocess(where: str, pretrained: dict[str, Any]) -> PreprocessConfig:
    _, rows, columns = _input_size(where, pretrained)
    crop_pct = _required(where, pretrained, "crop_pct")
    if not isinstance(crop_pct, int | float) or isinstance(crop_pct, bool) or not 0.01 <= crop_pct <= 1:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_pct {crop_pct!r}: expected a number above 0, at most 1")
    crop_mode = _required(where, pretrained, "crop_mode")
    if not isinstance(crop_mode, str) or crop_mode not in _RESIZE:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_mode {crop_mode!r}: expected one of {sorted(_RESIZE)}")
    if pretrained.get("crop_border_pixels"):
        raise CheckpointError(f"{where}: pretrained_cfg.crop_border_pixels is not read by this version")
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


def _labels(
    where: str, config: dict[str, Any], pretrained: dict[str, Any], classes: int, options: Options
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Labels and notes: human descriptions where the config has them, else its label names.

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
    size = _required(where, pretrained, "input_size")
    if not isinstance(size, list) or len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"{where}: pretrained_cfg.input_size {size!r:.100}: expected [channels, rows, columns]")
    channels, rows, columns = size
    return channels, rows, columns


def _required(where: str, mapping: dict[str, Any], key: str) -> Any:
    if mapping.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing")
    return mapping[key]
