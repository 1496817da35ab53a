"""timm's hub layout: a folder with `config.json` (architecture, pretrained_cfg) and its weights.

Source of names and defaults: timm/models/_hub.py and timm/data/transforms_factory.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.options import CheckpointOptions, imagenet_labels
from model.checkpoint.refusals import required, validating
from model.checkpoint.resizing import resized_config, resized_positions
from model.checkpoint.timm_architectures import (
    TimmArguments,
    architectures,
    native_names,
    parse_arguments,
    runs_in_library,
)
from model.checkpoint.timm_eva import EvaArguments
from model.config import LibraryConfig, NetworkConfig, PreprocessConfig
from model.errors import CheckpointError
from model.network import library

FORMAT: Final = "timm"

_RESIZE: Final = {"center": "shortest_edge", "squash": "squash", "border": "border"}
_WRAPPER: Final = "timm_wrapper"
"""The `model_type` of transformers' wrapper around timm's models."""
_WRAPPED: Final = "timm_model."
"""What it puts before the names."""
_UNUSED_ARGS: Final = frozenset(
    {"weight_init", "fix_init", "strict_img_size", "head_init_scale"}
    | {f"rope_{kind}_coords" for kind in ("shift", "jitter", "rescale")}
)
"""Arguments that change training or checks, never an answer."""


def recognises(files: Files) -> bool:
    """Return whether a folder's `config.json` is timm's, or that of transformers' wrapper around its models."""
    config = files.config
    if config is None or not isinstance(config.get("architecture"), str):
        return False
    return "pretrained_cfg" in config or config.get("model_type") == _WRAPPER


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a folder as timm's `save_for_hf` and `push_to_hf_hub` write it."""
    where = files.where(CONFIG_FILE)
    config = files.config
    assert config is not None
    options.refuse_architecture(where)
    name = config["architecture"]
    pretrained = required(config, "pretrained_cfg", where)
    if not isinstance(pretrained, dict):
        raise CheckpointError(f"{where}: pretrained_cfg: expected an object")
    network: NetworkConfig
    size = _input_size(where, pretrained)[1:]
    if runs_in_library(name, where):
        network = _library_config(where, config, pretrained)
    else:
        arguments = _arguments(where, config, pretrained)
        with validating(where):
            network = vit = arguments.vit_config()
        if size != vit.image_size and (not arguments.dynamic_img_size or vit.relative_position_bias):
            raise CheckpointError(f"{where}: pretrained_cfg.input_size {size} disagrees with img_size {vit.image_size}")
    preprocess = options.preprocess_or(None if options.preprocess else preprocess_of(pretrained, where), where)
    labels, assumed = _labels(where, config, pretrained, network.num_classes, options)
    stored = {name.removeprefix(_WRAPPED): tensor for name, tensor in files.tensors().items()}
    if isinstance(network, LibraryConfig):
        tensors = native_tensors(library.renamed_by_library(network, stored), network, files.place)
    else:
        tensors = native_tensors(native_names(stored, arguments, vit, files.place), vit, files.place)
        if size != vit.image_size:
            # What timm's `dynamic_img_size` does at each forward pass is done once.
            network = resized_config(vit, size, files.source)
            tensors = resized_positions(tensors, vit, network)
    tag = pretrained.get("tag")
    return Checkpoint(
        name=f"{name}.{tag}" if isinstance(tag, str) and tag else name,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=network,
        preprocess=preprocess,
        labels=labels,
        tensors=tensors,
        revision=files.revision,
        assumed=assumed,
    )


def _arguments(where: str, config: dict[str, Any], pretrained: dict[str, Any]) -> TimmArguments | EvaArguments:
    """Return the architecture's own arguments, overridden by what the config says."""
    arguments = dict(architectures()[config["architecture"]])
    in_chans, *size = _input_size(where, pretrained)
    arguments |= {"img_size": tuple(size), "in_chans": in_chans}
    arguments |= _given(where, config, ("num_classes", "global_pool"))
    with validating(where):
        return parse_arguments(arguments)


def _given(where: str, config: dict[str, Any], demanded: tuple[str, ...]) -> dict[str, Any]:
    """Return what a config says of its architecture's arguments; those that are demanded stand beside `model_args`."""
    given = config.get("model_args") or {}
    if not isinstance(given, dict):
        raise CheckpointError(f"{where}: model_args: expected an object")
    arguments = {key: value for key, value in given.items() if key not in _UNUSED_ARGS}
    # transformers' wrapper says in `model_args` alone how its model pools.
    is_wrapped = config.get("model_type") == _WRAPPER
    for key in demanded[:1] if is_wrapped else demanded:
        value = required(config, key, where)
        if key in given and given[key] != value:  # NaN, which JSON may hold, is not itself
            raise CheckpointError(f"{where}: {key} is {value!r}, but {given[key]!r} in model_args")
        arguments[key] = value
    return arguments


def _library_config(where: str, config: dict[str, Any], pretrained: dict[str, Any]) -> LibraryConfig:
    """Return the configuration of an architecture that timm's own code runs."""
    pooled = ("num_classes", "global_pool") if config.get("global_pool") else ("num_classes",)
    arguments = {key: value for key, value in _given(where, config, pooled).items() if value is not None}
    channels, rows, columns = _input_size(where, pretrained)
    name, classes = config["architecture"], arguments.pop("num_classes")
    if classes == 0:
        raise CheckpointError(f"{where}: num_classes is 0: timm's {name} is read with a classification head only")
    fixed = pretrained.get("fixed_input_size", library.published(name).get("fixed_input_size"))
    if arguments.pop("in_chans", channels) != channels:
        raise CheckpointError(f"{where}: model_args.in_chans is not the {channels} of pretrained_cfg.input_size")
    with validating(where):
        return library.library_config(name, arguments, classes, channels, (rows, columns), fixed_size=bool(fixed))


def preprocess_of(pretrained: Mapping[str, Any], where: str) -> PreprocessConfig:
    """Return the preprocessing that a `pretrained_cfg` states, as timm's evaluation transforms compute it."""
    _, rows, columns = _input_size(where, pretrained)
    crop_pct = required(pretrained, "crop_pct", where)
    if not isinstance(crop_pct, int | float) or isinstance(crop_pct, bool) or not 0.01 <= crop_pct <= 1:
        raise CheckpointError(f"{where}: pretrained_cfg.crop_pct {crop_pct!r}: expected a number above 0, at most 1")
    crop_mode = pretrained.get("crop_mode") or "center"  # as timm takes it
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
    """Return labels and what was assumed: human descriptions where the config has them, else its label names.

    timm's own ImageNet-1k checkpoints carry none; their tag says what they were trained on.
    """
    if options.labels is not None or not classes:
        return options.labels_or(None, classes, where), ()
    names = config.get("label_names") or pretrained.get("label_names")
    tag = pretrained.get("tag")
    if names is None and classes == 1000 and isinstance(tag, str) and tag.endswith("in1k"):
        return imagenet_labels(), (f"labels: imagenet-1k, for its tag {tag!r} (VIT_LABELS)",)
    if names is None:
        return options.labels_or(None, classes, f"{where}: label_names is missing"), ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{where}: label_names: expected a list of {classes} strings")
    descriptions = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    if not isinstance(descriptions, dict) or not all(isinstance(d, str) for d in descriptions.values()):
        raise CheckpointError(f"{where}: label_descriptions: expected an object of strings")
    return tuple(str(descriptions.get(name, name)) for name in names), ()


def _input_size(where: str, pretrained: Mapping[str, Any]) -> tuple[int, int, int]:
    size = required(pretrained, "input_size", where)
    if not isinstance(size, list | tuple) or len(size) != 3 or not all(type(n) is int and n > 0 for n in size):
        raise CheckpointError(f"{where}: pretrained_cfg.input_size {size!r:.100}: expected [channels, rows, columns]")
    channels, rows, columns = size
    return channels, rows, columns
