"""timm's hub layout: a folder with `config.json` (architecture, pretrained_cfg) and its weights.

Source of names and defaults: timm/models/_hub.py and timm/data/transforms_factory.py.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from model.checkpoint.checkpoint import (
    Checkpoint,
    native_tensors,
    resized_config,
    resized_positions,
)
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE
from model.checkpoint.labels import imagenet_labels
from model.checkpoint.local_files import required, validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.own_heads import with_head
from model.checkpoint.stated_head import Labels, stated_head
from model.checkpoint.timm_architectures import architectures, runs_in_library
from model.checkpoint.timm_arguments import parse_arguments
from model.checkpoint.timm_names import native_names
from model.config import CropShare, Interpolation, NetworkConfig, PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network import library

FORMAT: Final = "timm"

_RESIZE: Final = {"center": "shortest_edge", "squash": "squash"}
# Architectures whose released weights are towers of CLIP and its kind.
_CLIP_TOWER: Final = re.compile("_clip_|_pe_core_")
_PROJECTION: Final = (
    "its head is the projection of a tower of CLIP, for its bias of zeros: it gives the embedding, and there are no "
    "classes (VIT_LABELS)"
)
_WRAPPER: Final = "timm_wrapper"  # the `model_type` of transformers' wrapper around timm's models
# Arguments that change training or checks, never an answer.
_UNUSED_ARGS: Final = frozenset(
    {"weight_init", "fix_init", "strict_img_size", "head_init_scale"}
    | {f"{part}drop_rate" for part in ("", "pos_", "patch_", "proj_", "attn_")}
    | {"drop_path_rate"}
    | {f"rope_{kind}_coords" for kind in ("shift", "jitter", "rescale")}
)
Count = Annotated[int, Field(ge=1)]


class Pretrained(BaseModel):
    """The fields of a `pretrained_cfg` that are read; `input_size` is (channels, rows, columns)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    input_size: tuple[Count, Count, Count]
    crop_pct: CropShare
    crop_mode: Literal["center", "squash"] | None = None
    interpolation: Interpolation
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tag: str | None = None
    fixed_input_size: bool | None = None

    def preprocess(self) -> PreprocessConfig:
        """Return the preprocessing, as timm's evaluation transforms compute it; raises
        pydantic.ValidationError.
        """
        _, rows, columns = self.input_size
        fields = {
            "size": (rows, columns),
            "resize": _RESIZE[self.crop_mode or "center"],  # as timm takes it
        }
        stated = self.model_dump(include={"crop_pct", "interpolation", "mean", "std"})
        return PreprocessConfig.model_validate(fields | stated)


def recognises(files: Files) -> bool:
    """Return whether a folder's `config.json` is timm's, or that of transformers' wrapper around
    its models.
    """
    config = files.config
    is_timms = "pretrained_cfg" in config or config.get("model_type") == _WRAPPER
    return is_timms and isinstance(config.get("architecture"), str)


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a folder as timm's `save_for_hf` and `push_to_hf_hub` write it."""
    where, config = files.where(CONFIG_FILE), files.config
    name = config["architecture"]
    stated = required(config, "pretrained_cfg", where)
    if isinstance(stated, dict) and stated.get("crop_mode") == "border" and not options.preprocess:
        raise CheckpointError(
            f"{where}: pretrained_cfg.crop_mode 'border' pads pictures, which this version does not compute: set "
            "VIT_PREPROCESS to another preprocessing"
        )
    with validating(where, "pretrained_cfg."):
        own = {"crop_mode": None} if options.preprocess else {}  # the operator's takes its place
        pretrained = Pretrained.model_validate(
            {**stated, **own} if isinstance(stated, dict) else stated
        )
        carried = None if options.preprocess else pretrained.preprocess()
    if config.get("model_type") == _WRAPPER and not options.preprocess:
        _refuse_processor(files)
    head = stated_head(_described(config, stated), where, options)
    make = _library if runs_in_library(name, where) else _own
    network, tensors = make(files, config, pretrained)
    labels = head.labels(network.num_classes, options)
    if _is_projection(name, network, tensors) and (labels is None or not labels.has_names):
        network, tensors = _projecting(network, tensors)
        labels = Labels(assumed=(_PROJECTION,))
    labels = labels or _assumed_labels(where, pretrained, network.num_classes, options)
    return Checkpoint(
        name=files.name,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=network,
        preprocess=options.preprocess_or(carried, where),
        labels=labels.names,
        tensors=tensors,
        multi_label=head.multi_label,
        revision=files.revision,
        notes=labels.notes,
        assumed=labels.assumed,
    )


def _refuse_processor(files: Files) -> None:
    """Refuse a processor that transformers would read instead of the `pretrained_cfg` of its
    wrapper.
    """
    if files.path(PREPROCESSOR_FILE) is None:
        return
    processor = files.json(PREPROCESSOR_FILE)
    kind = processor.get("image_processor_type", processor.get("feature_extractor_type"))
    if kind not in (None, "TimmWrapperImageProcessor"):
        raise CheckpointError(
            f"{files.where(PREPROCESSOR_FILE)}: {kind!r:.100} stands against the pretrained_cfg of {CONFIG_FILE}: set "
            "VIT_PREPROCESS to the preprocessing of the training, or remove the wrong one of both"
        )


def _own(
    files: Files, config: Mapping[str, Any], pretrained: Pretrained
) -> tuple[NetworkConfig, Mapping[str, Tensor]]:
    """Return the network that is vitserve's own, and its tensors."""
    where, (in_chans, *size) = files.where(CONFIG_FILE), pretrained.input_size
    arguments = architectures()[config["architecture"]] | {
        "img_size": tuple(size),
        "in_chans": in_chans,
    }
    arguments |= _given(where, config, ("num_classes", "global_pool"))
    with validating(where):
        made = parse_arguments(arguments)
        vit = made.vit_config()
    taken = pretrained.input_size[1:]
    stored = files.without(_stored(files), "mask_token")
    if vit.num_classes:
        stored = with_head(stored, files.place, "head")
    tensors = native_tensors(native_names(stored, made, vit, files.place), vit, files.place)
    if not made.dynamic_img_size or vit.relative_position_bias:
        return vit, tensors
    # What timm's `dynamic_img_size` does at each forward pass is done once.
    network = resized_config(vit, taken, files.source)
    return network, tensors if taken == vit.image_size else resized_positions(tensors, vit, network)


def _library(
    files: Files, config: Mapping[str, Any], pretrained: Pretrained
) -> tuple[NetworkConfig, Mapping[str, Tensor]]:
    """Return the network that timm's own code runs, and its tensors."""
    where, (channels, *size) = files.where(CONFIG_FILE), pretrained.input_size
    pooled = ("num_classes", "global_pool") if config.get("global_pool") else ("num_classes",)
    arguments = {
        key: value for key, value in _given(where, config, pooled).items() if value is not None
    }
    name, classes = config["architecture"], arguments.pop("num_classes")
    if classes == 0:
        raise CheckpointError(
            f"{where}: num_classes is 0: timm's {name} is read with a classification head only"
        )
    if arguments.pop("in_chans", channels) != channels:
        raise CheckpointError(
            f"{where}: model_args.in_chans is not the {channels} of pretrained_cfg.input_size"
        )
    fixed = pretrained.fixed_input_size
    with validating(where):
        network = library.library_config(
            name, arguments, classes, channels, (size[0], size[1]), fixed_size=fixed
        )
    return network, native_tensors(
        library.renamed_by_library(network, _stored(files)), network, files.place
    )


def _stored(files: Files) -> dict[str, Tensor]:
    return {name.removeprefix("timm_model."): tensor for name, tensor in files.tensors().items()}


def _given(where: str, config: Mapping[str, Any], demanded: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a config's architecture; those that are demanded stand beside
    `model_args`.
    """
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


def _described(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config that describe its head, which may stand within `pretrained_cfg`
    instead.
    """
    keys = ("problem_type", "label_names", "label_descriptions")
    within = {key: pretrained[key] for key in keys if pretrained.get(key)}
    return within | {key: value for key, value in config.items() if value}


def _is_projection(
    architecture: str, network: NetworkConfig, tensors: Mapping[str, Tensor]
) -> bool:
    """Return whether the head is the projection of a tower of CLIP, which timm stores as a head
    with a bias of zeros.

    A classifier that was trained has another bias.
    """
    bias = tensors.get("head.bias")
    is_own = isinstance(network, ViTConfig) and not network.distillation_head
    return (
        is_own
        and _CLIP_TOWER.search(architecture) is not None
        and bias is not None
        and not bias.any()
    )


def _projecting(
    network: NetworkConfig, tensors: Mapping[str, Tensor]
) -> tuple[NetworkConfig, Mapping[str, Tensor]]:
    """Return the network without classes, which gives what its head gave as its embedding."""
    projected = {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}
    projected["projection.weight"] = tensors["head.weight"]
    fields = {"num_classes": 0, "projection_width": network.num_classes}
    return network.model_copy(update=fields), projected


def _assumed_labels(
    where: str, pretrained: Pretrained, classes: int, options: CheckpointOptions
) -> Labels:
    """Return the labels that the tag tells: timm's own ImageNet-1k checkpoints carry none."""
    tag = pretrained.tag or ""
    if classes == 1000 and tag.endswith("in1k"):
        return Labels(
            imagenet_labels(), assumed=(f"labels: imagenet-1k, for its tag {tag!r} (VIT_LABELS)",)
        )
    return Labels(options.labels_or(None, classes, f"{where}: label_names is missing"))
