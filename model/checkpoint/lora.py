"""LoRA folders of PEFT (`adapter_config.json`): the adapter is merged into its base's tensors while
they are read.

W + B A alpha / r, as `merge_and_unload` of peft/tuners/lora/layer.py. Other kinds of adapters are
refused by name.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from model.checkpoint import huggingface, native, timm
from model.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG_FILE, Files
from model.checkpoint.labels import UNNAMED
from model.checkpoint.local_files import required
from model.checkpoint.options import CheckpointOptions
from model.errors import CheckpointError

# From the names of a library's files, or of its memory, which adapters are saved under, to one of
# both.
Renaming = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_LORA: Final = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
_WHOLE: Final = re.compile(r"\.(?:modules_to_save(?:\.default)?|base_layer)\.")
# Layers that are not a head, by a part of their names.
_TRUNK: Final = re.compile(
    r"(?:^|\.)(?:layers?|blocks?|stages?|encoder|stem|embeddings|patch_embed|pooler|attn_pool|pre_logits|"
    r"vision_model|text_model|\w*projection)\."
)
# Fields of a config that describe the classes of its head.
_CLASSES: Final = ("id2label", "label2id", "num_labels", "label_names", "label_descriptions")
# Fields that are read, that the tensors themselves answer, or that training alone reads.  PEFT puts
# `fan_in_fan_out` aside for linear layers, and the networks that are read here have no others that
# it is for.
_READ: Final = frozenset(
    {
        "lora_alpha",
        "r",
        "use_rslora",
        "alpha_pattern",
        "peft_type",
        "auto_mapping",
        "base_model_name_or_path",
    }
    | {
        "revision",
        "task_type",
        "inference_mode",
        "peft_version",
        "bias",
        "target_modules",
        "exclude_modules",
    }
    | {"modules_to_save", "layers_to_transform", "layers_pattern", "lora_dropout", "rank_pattern"}
    | {
        "fan_in_fan_out",
        "megatron_core",
        "ensure_weight_tying",
        "loftq_config",
        "eva_config",
        "runtime_config",
    }
    | {"init_lora_weights", "qalora_group_size"}
)
_MERGE: Final = (
    "merge the adapter where it was trained, with merge_and_unload(), and save the model"
)
# Of `init_lora_weights`: those that leave the base as it is.
_PLAIN_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")


def adapter_base(adapter: Files, base: str | None) -> str:
    """Return the base of an adapter: the operator's (`VIT_BASE`), else the one that its config
    names.

    Raises:
        CheckpointError: it is no LoRA adapter that is read, or nobody names its base.
    """
    where = adapter.where(ADAPTER_CONFIG)
    config = adapter.json(ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(
            f"{where}: peft_type {config.get('peft_type')!r:.100} is not read; LORA is"
        )
    unknown = sorted(key for key, value in config.items() if value and key not in _READ)
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        unknown.append(f"init_lora_weights {config['init_lora_weights']!r:.100}")
    if unknown:
        raise CheckpointError(f"{where}: {unknown[0]} is not read: {_MERGE}")
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if base is None and (not isinstance(named, str) or not named):
        raise CheckpointError(
            f"{where}: base_model_name_or_path is missing: set VIT_BASE to the checkpoint it adapts"
        )
    return base or (f"{named}@{revision}" if isinstance(revision, str) and revision else str(named))


def adapt(base: Files, adapter: Files, options: CheckpointOptions) -> None:
    """Let a base give its tensors with an adapter merged into them.

    Args:
        base: files of the base, whose config gets the classes of the adapter's head.
        adapter: files of the adapter.
        options: of the operator, whose labels count first.

    Raises:
        CheckpointError: the adapter has no weights that can be read, or no file says the labels of
        its head.
    """
    where = f"{adapter.place} (base {base.place})"
    base.source, base.overlay = adapter.source, adapter
    config = adapter.json(ADAPTER_CONFIG)
    safetensors, pickle = ADAPTER_WEIGHTS
    weights = safetensors if adapter.path(safetensors) is not None else pickle
    changes = {
        name.removeprefix("base_model.model."): tensor
        for name, tensor in adapter.part(weights).items()
    }
    heads = (tensor for name, tensor in changes.items() if _is_head(_WHOLE.sub(".", name), tensor))
    head = next(heads, None)
    classes = None if head is None else head.shape[0]
    if classes is not None:
        _take_classes(base, adapter, classes, options)
    renaming: Renaming = dict
    if huggingface.recognises(base):
        mapping = config.get("auto_mapping")
        class_name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        renaming = huggingface.adapted(base, class_name)
    elif timm.recognises(base) and classes is not None:
        timm.adapted(base, classes)
    elif native.recognises(base) and classes is not None:
        native.adapted(base, classes)
    base.merge = lambda tensors: _merged(renaming(tensors), changes, config, renaming, where)


def _is_head(name: str, tensor: Tensor) -> bool:
    """Return whether an adapter's tensor is the weight of a head that was saved whole."""
    is_weight = name.endswith(".weight") and tensor.ndim > 1
    return is_weight and "lora_" not in name and _TRUNK.search(name) is None


def _take_classes(base: Files, adapter: Files, classes: int, options: CheckpointOptions) -> None:
    """Replace what a base's config says of its classes by what the adapter's side says.

    The number of classes does not tell whether the labels are still the same.
    """
    config = base.config
    stated = {
        key: adapter.config[key] for key in (*_CLASSES, "problem_type") if adapter.config.get(key)
    }
    names = config.get("id2label")
    has_as_many = isinstance(names, dict) and len(names) == classes
    is_numbered = has_as_many and all(
        UNNAMED.fullmatch(str(name)) for name in dict(names or {}).values()
    )
    is_named = bool(stated.get("id2label") or stated.get("label_names"))
    if options.activation is None and "problem_type" not in stated:
        base.assumed = (
            "activation: that of the base, though the adapter has a head of its own (VIT_ACTIVATION)",
        )
    if options.labels is None and not is_named and not is_numbered and config:
        same = ""
        if has_as_many:
            same = f"; if they are the base's, to {base.path(CONFIG_FILE)}"
        raise CheckpointError(
            f"{adapter.place}: no labels for its {classes} classes: set VIT_LABELS to a file, to names like cat,dog "
            f"or to numbers{same} (the adapter has a head of its own, and the labels of {base.place} are of another)"
        )
    if is_named or not is_numbered:
        pretrained = config.get("pretrained_cfg")
        for described in (config, pretrained if isinstance(pretrained, dict) else {}):
            for key in _CLASSES:
                described.pop(key, None)
    config.update(stated)


def _merged(
    base: dict[str, Tensor],
    adapter: Mapping[str, Tensor],
    config: Mapping[str, Any],
    renaming: Renaming,
    where: str,
) -> dict[str, Tensor]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        match = _LORA.fullmatch(name)
        if match is not None:
            pairs.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in name:
            raise CheckpointError(f"{where}: {name!r} is not of plain LoRA: {_MERGE}")
        else:  # saved whole, as `modules_to_save` and `bias` ask for
            base |= renaming({_WHOLE.sub(".", name): tensor})
    if not pairs:
        raise CheckpointError(f"{where}: the adapter has no tensors of LoRA")
    for module, parts in pairs.items():
        scale, change = _scale(config, module, parts, where), _change(parts)
        [target] = renaming({f"{module}.weight": parts["B"]})
        if target not in base:
            raise CheckpointError(
                f"{where}: the adapter changes {module!r}, which the base does not have"
            )
        if change is None or change.shape != base[target].shape:
            shapes = ", ".join(str(list(part.shape)) for part in parts.values())
            raise CheckpointError(
                f"{where}: the adapter of {module!r}, {shapes}, is not for {list(base[target].shape)}"
            )
        base[target] = base[target].float() + change * scale
    return base


def _change(parts: Mapping[str, Tensor]) -> Tensor | None:
    """Return B A, as a weight of a linear layer or of a convolution, or None where they do not fit
    together.
    """
    down, up = parts["A"].float(), parts["B"].float()
    if up.ndim != down.ndim or up.ndim not in (2, 4) or up.shape[1] != down.shape[0]:
        return None
    if up.ndim == 4:
        return F.conv2d(down.transpose(0, 1), up).transpose(0, 1)
    return up @ down


def _scale(
    config: Mapping[str, Any], module: str, parts: Mapping[str, Tensor], where: str
) -> float:
    if not {"A", "B"} <= parts.keys():
        raise CheckpointError(f"{where}: the adapter changes {module!r} in part")
    patterns = config.get("alpha_pattern") or {}
    # PEFT's keys are regular expressions: few of them take exponential time, and those of models
    # have `.*` at most.
    plain = isinstance(patterns, dict) and all(
        re.fullmatch(r"[\w.]+(?:\.\*[\w.]*)?", str(key)) for key in patterns
    )
    if not plain:
        raise CheckpointError(f"{where}: alpha_pattern is not of names of modules: {_MERGE}")
    found = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    alpha = found[0] if found else required(config, "lora_alpha", where)
    rank = parts["A"].shape[0] if parts["A"].ndim else 0
    if not isinstance(alpha, int | float) or not rank:
        raise CheckpointError(f"{where}: lora_alpha {alpha!r:.100}: expected a number")
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)
