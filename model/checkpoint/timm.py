"""timm's hub layout: a folder with `config.json` (architecture, pretrained_cfg) and its weights.

Source of names and defaults: timm/models/_hub.py and timm/data/transforms_factory.py.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import CONFIG_FILE, Files
from model.checkpoint.huggingface.preprocessor import PREPROCESSOR_FILE
from model.checkpoint.input_size import StoredNetwork, resized_network
from model.checkpoint.labels import imagenet_labels
from model.checkpoint.local_files import advising, required, validating
from model.checkpoint.options import SET_PREPROCESS, CheckpointOptions
from model.checkpoint.own_heads import with_bias, with_head
from model.checkpoint.stated_head import HeadLabels, stated_head
from model.checkpoint.timm_architectures import architectures, runs_in_library, split_name
from model.checkpoint.timm_arguments import parse_arguments
from model.checkpoint.timm_names import native_names
from model.config import CropShare, Interpolation, PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.network import library

FORMAT: Final = "timm"

_RESIZE: Final = {"center": "shortest_edge", "squash": "squash"}
# Architectures whose released weights are towers of CLIP and its kind.
_CLIP_TOWER: Final = re.compile("_clip_|_pe_core_")
_PROJECTION: Final = (
    "its head is the projection of a tower of CLIP, because its bias is zero: it gives the "
    "embedding, and there are no classes (VIT_LABELS)"
)
_POOLINGS: Final = (
    "add what the head reads: token (the CLS token, as usual), avg (the mean of the patches), or "
    "map (an attention pooling, whose tensors are attn_pool)"
)
_WRAPPER: Final = "timm_wrapper"  # the `model_type` of transformers' wrapper around timm's models
# Arguments that change training or checks, but never an answer.
_UNUSED_ARGUMENTS: Final = frozenset(
    {
        "attn_drop_rate",
        "drop_path_rate",
        "drop_rate",
        "exportable",
        "fix_init",
        "head_init_scale",
        "patch_drop_rate",
        "pos_drop_rate",
        "proj_drop_rate",
        "rope_jitter_coords",
        "rope_rescale_coords",
        "rope_shift_coords",
        "scriptable",
        "strict_img_size",
        "weight_init",
    }
)
Count = Annotated[int, Field(ge=1)]
Statistic = Annotated[
    tuple[float, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, int | float) else value),
]


class _Described(BaseModel):
    """The fields of a `pretrained_cfg` that are read besides its preprocessing.

    `input_size` is (channels, rows, columns).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    input_size: tuple[Count, Count, Count]
    tag: str | None = None
    fixed_input_size: bool | None = None


class Pretrained(_Described):
    """The fields of a `pretrained_cfg` that are read."""

    crop_pct: CropShare
    crop_mode: Literal["center", "squash"] | None = None
    interpolation: Interpolation
    mean: Statistic
    std: Statistic

    def preprocess(self) -> PreprocessConfig:
        """Return timm's preprocessing for evaluation; raises pydantic.ValidationError."""
        fields = {
            "size": self.input_size[1:],
            "resize": _RESIZE[self.crop_mode or "center"],  # timm's own default
        }
        stated = self.model_dump(include={"crop_pct", "interpolation"})
        for name, values in (("mean", self.mean), ("std", self.std)):
            # As in timm, one number is for all channels.
            stated[name] = values * self.input_size[0] if len(values) == 1 else values
        return PreprocessConfig.model_validate(fields | stated)


def recognises(files: Files) -> bool:
    """Return whether a `config.json` is timm's, or of transformers' wrapper around timm."""
    config = files.config
    if not isinstance(config.get("architecture"), str):
        return False
    is_timms = "architectures" not in config or config.get("model_type") == _WRAPPER
    return "pretrained_cfg" in config or (is_timms and "format" not in config)


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read a folder as timm's `save_for_hf` and `push_to_hf_hub` write it."""
    where = files.where(CONFIG_FILE)
    name, tag = split_name(files.config["architecture"])
    config = files.config | {"architecture": name}
    if config.get("architectures") == ["TimmWrapperModel"]:
        config["num_classes"] = 0
    described = _described(config, tag, where)
    carried = None
    if options.preprocess:
        with validating(where, "pretrained_cfg."):
            pretrained = _Described.model_validate(described)
    else:
        pretrained, carried = _preprocessing(described, where)
        if config.get("model_type") == _WRAPPER:
            _refuse_processor(files)
    head = stated_head(_head_fields(config, described), where, options)
    if runs_in_library(name, where):
        network = _library_network(files, config, pretrained)
    else:
        network = _vit(files, config, pretrained, at_input_size=options.image_size is None)
    labels = head.labels(network.config.num_classes, options)
    if _is_projection(name, network) and (labels is None or not labels.has_names):
        network = _projecting(network)
        labels = HeadLabels(assumed=(_PROJECTION,))
    if labels is None:
        labels = _assumed_labels(where, pretrained, network.config.num_classes, options)
    return Checkpoint(
        name=files.name,
        source=files.source,
        format=FORMAT,
        architecture=name,
        config=network.config,
        preprocess=options.preprocess_or(carried, where),
        labels=labels.names,
        tensors=network.tensors,
        resized_from=network.resized_from,
        multi_label=head.multi_label,
        notes=labels.notes,
        assumed=labels.assumed,
    )


def _described(config: Mapping[str, Any], tag: str, where: str) -> dict[str, Any]:
    """Return the `pretrained_cfg`; timm's first folders have its fields in the config itself."""
    described = config.get("pretrained_cfg")
    if described is None and "input_size" in config:
        described = config
    if not isinstance(described, dict):
        raise CheckpointError(
            f"{where}: pretrained_cfg is missing: an object with input_size, crop_pct, "
            "interpolation, mean and std, as timm.models.save_for_hf(model, FOLDER) writes it"
        )
    if described is not config and described.get("model_args"):
        raise CheckpointError(
            f"{where}: pretrained_cfg.model_args: timm reads model_args beside pretrained_cfg: "
            "move it there, or remove it"
        )
    return {"tag": tag or None} | described


def _preprocessing(described: dict[str, Any], where: str) -> tuple[Pretrained, PreprocessConfig]:
    """Return the `pretrained_cfg` and its preprocessing; the refusal names the setting for it."""
    share = described.get("crop_pct")
    is_padded = isinstance(share, int | float) and share > 1
    if is_padded or described.get("crop_mode") == "border":
        field = "crop_pct" if is_padded else "crop_mode"
        plain = described | {"crop_mode": "center", "crop_pct": 1.0 if is_padded else share}
        _, preprocess = _preprocessing(plain, where)
        raise CheckpointError(
            f"{where}: pretrained_cfg.{field} {described[field]!r} pads pictures, which this "
            "version does not compute: set VIT_PREPROCESS (--preprocess) to another preprocessing, "
            f"such as {preprocess.model_dump_json(exclude_none=True)}"
        )
    with advising(SET_PREPROCESS), validating(where, "pretrained_cfg."):
        pretrained = Pretrained.model_validate(described)
        return pretrained, pretrained.preprocess()


def _refuse_processor(files: Files) -> None:
    """Refuse a processor that transformers would read instead of its wrapper's `pretrained_cfg`."""
    if files.path(PREPROCESSOR_FILE) is None:
        return
    processor = files.json(PREPROCESSOR_FILE)
    kind = processor.get("image_processor_type", processor.get("feature_extractor_type"))
    if kind not in (None, "TimmWrapperImageProcessor"):
        raise CheckpointError(
            f"{files.where(PREPROCESSOR_FILE)}: {kind!r:.100} contradicts the pretrained_cfg of "
            f"{CONFIG_FILE}: set VIT_PREPROCESS to the preprocessing of the training, or remove "
            "the wrong one"
        )


def _vit(
    files: Files, config: Mapping[str, Any], pretrained: _Described, *, at_input_size: bool
) -> StoredNetwork:
    """Return a network that vitserve itself computes.

    Args:
        at_input_size: whether the model runs at its own input size. If so, and if
            `dynamic_img_size` is set, positions are resized here. Otherwise they are resized later
            to the operator's size.
    """
    where = files.where(CONFIG_FILE)
    channels, rows, columns = pretrained.input_size
    arguments = {
        **architectures()[config["architecture"]],
        "img_size": (rows, columns),
        "in_chans": channels,
        **_arguments(where, config, ("num_classes", "global_pool")),
    }
    if arguments.get("norm_layer"):
        arguments["norm_eps"] = 1e-6  # timm's own, in place of the architecture's
    advice = "; arguments of model_args that change no answer can be left out"
    with advising(advice), validating(where):
        parsed = parse_arguments(arguments)
        vit = parsed.vit_config()
    stored = files.without(_stored(files), "mask_token")
    if vit.num_classes:
        stored = with_head(stored, files, {}, "head")
    tensors = native_tensors(native_names(stored, parsed, vit, files.title), vit, files.title)
    is_resized = at_input_size and parsed.dynamic_img_size and not vit.relative_position_bias
    if not is_resized:
        return StoredNetwork(vit, tensors)
    # timm's `dynamic_img_size` resizes positions at each forward pass; once is enough.
    return resized_network(tensors, vit, (rows, columns), files.source)


def _library_network(
    files: Files, config: Mapping[str, Any], pretrained: _Described
) -> StoredNetwork:
    """Return a network that timm's own code computes."""
    where = files.where(CONFIG_FILE)
    channels, rows, columns = pretrained.input_size
    demanded = ("num_classes", "global_pool") if config.get("global_pool") else ("num_classes",)
    stated = _arguments(where, config, demanded)
    arguments = {key: value for key, value in stated.items() if value is not None}
    name = config["architecture"]
    classes = arguments.pop("num_classes")
    if classes == 0:
        raise CheckpointError(
            f"{where}: num_classes is 0: timm's {name} is read with a classification head only"
        )
    if arguments.pop("in_chans", channels) != channels:
        raise CheckpointError(
            f"{where}: model_args.in_chans is not the {channels} of pretrained_cfg.input_size"
        )
    with validating(where):
        network = library.library_config(
            name,
            arguments,
            classes,
            channels,
            (rows, columns),
            fixed_size=pretrained.fixed_input_size,
        )
    tensors = library.renamed_by_library(network, _stored(files))
    tensors = with_bias(tensors, library.linear_head(network) or "", files)
    return StoredNetwork(network, native_tensors(tensors, network, files.title))


def _stored(files: Files) -> dict[str, Tensor]:
    return {name.removeprefix("timm_model."): tensor for name, tensor in files.tensors().items()}


def _arguments(where: str, config: Mapping[str, Any], demanded: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a config's architecture.

    Args:
        where: name of the file in messages.
        config: content of the file.
        demanded: arguments that are fields of the config itself, next to `model_args`.
    """
    stated = config.get("model_args") or {}
    if not isinstance(stated, dict):
        raise CheckpointError(f"{where}: model_args: expected an object")
    arguments = {key: value for key, value in stated.items() if key not in _UNUSED_ARGUMENTS}
    # transformers' wrapper states the pooling only in `model_args`, timm's first folders nowhere.
    is_wrapped = config.get("model_type") == _WRAPPER
    has_own_pooling = is_wrapped or not (config.get("pretrained_cfg") or config.get("global_pool"))
    for key in demanded[:1] if has_own_pooling else demanded:
        if key == "global_pool" and config.get(key) is None:
            raise CheckpointError(f"{where}: global_pool is missing: {_POOLINGS}")
        value = required(config, key, where)
        if key in stated and stated[key] != value:  # true for NaN too, which JSON may hold
            raise CheckpointError(f"{where}: {key} is {value!r}, but {stated[key]!r} in model_args")
        arguments[key] = value
    return arguments


def _head_fields(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that describe the head, from the config or else its `pretrained_cfg`."""
    keys = ("problem_type", "label_names", "label_descriptions")
    inner = {key: pretrained[key] for key in keys if pretrained.get(key)}
    if "pretrained_cfg" not in config and config.get("labels"):  # in timm's first folders
        inner["label_names"] = config["labels"]
    return inner | {key: value for key, value in config.items() if value}


def _is_projection(architecture: str, network: StoredNetwork) -> bool:
    """Return whether the head is the projection of a tower of CLIP.

    timm stores the projection as a head with a bias of zeros. A trained classifier has another
    bias.
    """
    is_vit = isinstance(network.config, ViTConfig) and not network.config.distillation_head
    if not is_vit or _CLIP_TOWER.search(architecture) is None:
        return False
    bias = network.tensors.get("head.bias")
    return bias is not None and not bias.any()


def _projecting(network: StoredNetwork) -> StoredNetwork:
    """Return the network without classes, whose embedding is the output of its former head."""
    tensors = {
        name: tensor for name, tensor in network.tensors.items() if not name.startswith("head.")
    }
    tensors["projection.weight"] = network.tensors["head.weight"]
    fields = {"num_classes": 0, "projection_width": network.config.num_classes}
    return StoredNetwork(network.config.model_copy(update=fields), tensors)


def _assumed_labels(
    where: str, pretrained: _Described, classes: int, options: CheckpointOptions
) -> HeadLabels:
    """Return the labels that the tag implies: timm's own ImageNet-1k checkpoints carry none."""
    tag = pretrained.tag or ""
    if classes == 1000 and tag.endswith("in1k"):
        assumed = f"labels: imagenet-1k, because of its tag {tag!r} (VIT_LABELS)"
        return HeadLabels(imagenet_labels(), assumed=(assumed,))
    return HeadLabels(options.labels_or(None, classes, f"{where}: label_names is missing"))
