"""LoRA folders of PEFT (`adapter_config.json`), read as their base with the adapter merged in.

Source: `merge_and_unload` of peft/tuners/lora/layer.py. Other kinds of adapters are refused by
name.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from model.checkpoint import huggingface, native, timm
from model.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_FILE, Files
from model.checkpoint.label_forms import UNNAMED
from model.checkpoint.local_files import resolved_source
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.sources import open_remote, open_source
from model.checkpoint.tensors import renamed
from model.errors import CheckpointError
from model.extensions.formats.lora_merge import MERGE, Renaming, head_of, merged
from model.extensions.formats.sentence_transformers import model_folder

# Fields of a config that describe the classes of its head.
_CLASSES: Final = ("id2label", "label2id", "num_labels", "label_names", "label_descriptions")
# Fields that are read, that the tensors themselves answer, or that only training reads. PEFT
# ignores `fan_in_fan_out` for linear layers, and the networks that are read here have no others
# that it applies to.
_READ: Final = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_bias",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_dora",
        "use_rslora",
    }
)
# Values of `init_lora_weights` that leave the base as it is.
_PLAIN_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")


def read(files: Files, options: CheckpointOptions) -> Files | None:
    """Return the base of an adapter, which gives its tensors with the adapter merged into them.

    Raises:
        CheckpointError: the adapter or its base cannot be read, or no file states the labels of
            the adapter's head.
    """
    if files.overlay is not None or files.path(ADAPTER_CONFIG) is None:
        return None
    names = files.names() if options.base is None else []
    if CONFIG_FILE in names and not set(files.weights).isdisjoint(names):
        raise CheckpointError(
            f"{files.title}: holds a model ({CONFIG_FILE}) and an adapter ({ADAPTER_CONFIG}), and "
            f"no file says whether they are merged: --base {_base_name(files, None)} (VIT_BASE) "
            f"reads the adapter; without {ADAPTER_CONFIG} the model is read"
        )
    base = model_folder(_open_base(files, options))
    if base.path(ADAPTER_CONFIG) is not None and base.path(CONFIG_FILE) is None:
        raise CheckpointError(
            f"{files.title}: its base {base.title} is an adapter, too: merge that one first, with "
            "merge_and_unload(), or set VIT_BASE (--base) to a whole model"
        )
    _adapt(base, files, options)
    return base


def _base_name(adapter: Files, base: str | None) -> str:
    """Return the operator's base (`VIT_BASE`), else the base that the adapter names.

    Raises:
        CheckpointError: the adapter is of a kind that is not read, or there is neither base.
    """
    where = adapter.where(ADAPTER_CONFIG)
    config = adapter.json(ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{where}: peft_type {kind!r:.100} is not read; LORA is: {MERGE}")
    unread = sorted(key for key, value in config.items() if value and key not in _READ)
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        unread.append(f"init_lora_weights {config['init_lora_weights']!r:.100}")
    if unread:
        raise CheckpointError(f"{where}: {unread[0]} is not read: {MERGE}")
    if base:
        return base
    name = config.get("base_model_name_or_path")
    if base is None and (not isinstance(name, str) or not name):
        raise CheckpointError(
            f"{where}: base_model_name_or_path is missing: set VIT_BASE to the checkpoint it adapts"
        )
    revision = config.get("revision")
    return f"{name}@{revision}" if isinstance(revision, str) and revision else str(name)


def _open_base(adapter: Files, options: CheckpointOptions) -> Files:
    """Return the files of the base; an adapter from the hub cannot name a path of this machine."""
    name = _base_name(adapter, options.base)
    if options.base is not None:
        return open_source(name)
    is_here = resolved_source(Path(name).expanduser(), name) is not None
    _require_below(adapter, name, options, is_here=is_here)
    is_cached = any(part.startswith("models--") for part in Path(adapter.title).parts)
    is_from_hub = adapter.is_remote or is_cached
    if is_here and not is_from_hub:
        return open_source(name)
    base = open_remote(name)
    if base is None:
        place = "not on this machine"
        if is_from_hub:
            place = "not a hub id, as its own is"
        raise CheckpointError(
            f"{adapter.title}: an adapter, whose base {name!r:.200} is {place}: set VIT_BASE "
            "(--base) to the checkpoint that it adapts"
        )
    return base


def _require_below(adapter: Files, name: str, options: CheckpointOptions, *, is_here: bool) -> None:
    """Refuse the base that an adapter names if it is outside the folders that may contain it."""
    if options.bases_below is None or (options.hub_bases and not is_here):
        return
    path = Path(os.path.realpath(name))
    if any(path.is_relative_to(os.path.realpath(folder)) for folder in options.bases_below):
        return
    folders = (
        "VIT_CHECKPOINT_FOLDER or VIT_MODELS" if options.hub_bases else "VIT_CHECKPOINT_FOLDER"
    )
    raise CheckpointError(
        f"{adapter.title}: its base {name!r:.200} does not lie below {folders}: set VIT_BASE"
    )


def _adapt(base: Files, adapter: Files, options: CheckpointOptions) -> None:
    """Make a base give its tensors with an adapter merged into them.

    Raises:
        CheckpointError: the adapter's weights cannot be read, or no file states the labels of its
            head.
    """
    where = f"{adapter.title} (base {base.title})"
    base.source = adapter.source
    base.overlay = adapter
    config = adapter.json(ADAPTER_CONFIG)
    safetensors, pickle = ADAPTER_WEIGHTS
    weights = safetensors if adapter.path(safetensors) is not None else pickle
    if adapter.path(weights) is None:
        raise CheckpointError(
            f"{adapter.title}: no weights of the adapter: copy or download {safetensors}, too"
        )
    changes = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in adapter.part(weights).items()
    }
    modules = config.get("modules_to_save")
    if isinstance(modules, list) and modules:
        trained = [name for name in changes if any(f".{part}." in f".{name}" for part in modules)]
        if not trained:
            raise CheckpointError(
                f"{adapter.where(weights)}: holds none of modules_to_save, {modules!r:.100}, which "
                "were trained: save the adapter again, or merge it where it was trained"
            )
    head = head_of(changes)
    if head is not None:
        _take_classes(base, adapter, head.shape[0], options)
    elif not native.recognises(base):
        base.config.update(_statements(base, adapter))
    renaming: Renaming = dict
    is_timms = timm.recognises(base)  # also transformers' wrapper around timm's models
    if huggingface.recognises(base) and not is_timms:
        renaming = _transformers_renaming(base, config)
    elif head is not None and is_timms:
        _resize_timm_head(base.config, head.shape[0])
    elif head is not None and native.recognises(base):
        _resize_native_head(base.config, head.shape[0])

    def merge(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        base.notes += (f"the LoRA adapter {adapter.title} is merged into {base.title}",)
        return merged(renaming(tensors), changes, config, renaming, where)

    base.merge = merge


def _transformers_renaming(base: Files, adapter_config: Mapping[str, Any]) -> Renaming:
    """Return the renaming for a base of transformers, read as the class the adapter names."""
    mapping = adapter_config.get("auto_mapping")
    class_name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if any(family.class_name == class_name for family in huggingface.FAMILIES):
        base.config["architectures"] = [class_name]
    family, _ = huggingface.family_of(base.config, base.where(CONFIG_FILE))
    return partial(renamed, rules=family.rules, where=base.title)


def _resize_timm_head(config: dict[str, Any], classes: int) -> None:
    config["num_classes"] = classes
    arguments = config.get("model_args")
    if isinstance(arguments, dict) and "num_classes" in arguments:
        arguments["num_classes"] = classes


def _resize_native_head(config: dict[str, Any], classes: int) -> None:
    """Give a native config the number of classes, and the scores of a head without a fit."""
    if isinstance(config.get("architecture"), dict):
        config["architecture"]["num_classes"] = classes
    config["temperature"] = 1.0
    config.pop("form", None)


def _stated(adapter: Files) -> dict[str, Any]:
    """Return the fields of an adapter's own config that describe its head."""
    config = adapter.config
    return {key: config[key] for key in (*_CLASSES, "problem_type") if config.get(key)}


def _statements(base: Files, adapter: Files) -> dict[str, Any]:
    """Return what an adapter without a head states about the head of its base.

    Labels of a base that has names of its own are compared later, with the head's tensors.
    """
    stated = _stated(adapter)
    if _is_numbered(base.config.get("id2label"), len(stated.get("id2label", ()))):
        return stated
    return {key: value for key, value in stated.items() if key == "problem_type"}


def _is_numbered(id2label: object, classes: int) -> bool:
    """Return whether there are as many labels, and all are numbers only, such as `LABEL_0`."""
    if not isinstance(id2label, dict) or len(id2label) != classes:
        return False
    return all(UNNAMED.fullmatch(str(name)) for name in id2label.values())


def _take_classes(base: Files, adapter: Files, classes: int, options: CheckpointOptions) -> None:
    """Replace the classes in a base's config by the classes that the adapter's files state.

    An equal number of classes does not tell whether the labels are still the same.
    """
    config = base.config
    stated = _stated(adapter)
    names = config.get("id2label")
    has_as_many = isinstance(names, dict) and len(names) == classes
    is_numbered = _is_numbered(names, classes)
    is_named = bool(stated.get("id2label") or stated.get("label_names"))
    if options.activation is None and "problem_type" not in stated:
        base.assumed = (
            "activation: that of the base, though the adapter has a head of its own "
            "(VIT_ACTIVATION)",
        )
    if options.labels is None and not is_named and not is_numbered and config:
        same = f"; if they are the base's, to {base.path(CONFIG_FILE)}" if has_as_many else ""
        raise CheckpointError(
            f"{adapter.title}: no labels for its {classes} classes: set VIT_LABELS to a file, to "
            f"names like cat,dog or to numbers{same} (the adapter has a head of its own, and the "
            f"labels of {base.title} are of another)"
        )
    if is_named or not is_numbered:
        pretrained = config.get("pretrained_cfg")
        for described in (config, pretrained if isinstance(pretrained, dict) else {}):
            for key in _CLASSES:
                described.pop(key, None)
    config.update(stated)
