"""LoRA folders of PEFT (`adapter_config.json`): the adapter is merged into its base's tensors while they are read.

W + B A alpha / r, as `merge_and_unload` of peft/tuners/lora/layer.py. Other kinds of adapters are refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from model.checkpoint import huggingface
from model.checkpoint.containers import chosen_state_dict
from model.checkpoint.files import Files
from model.checkpoint.refusals import required
from model.checkpoint.tensor_files.pickles import read_pickle
from model.checkpoint.tensor_files.safetensors_files import read_safetensors
from model.errors import CheckpointError

ADAPTER_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = "adapter_model.safetensors"
_PICKLE: Final = "adapter_model.bin"
_PREFIX: Final = "base_model.model."
Renaming = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""From the names that a library has in memory, which adapters are saved under, to those of its files."""

_LORA: Final = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.(weight|bias)")
_READ: Final = frozenset({"lora_alpha", "r", "use_rslora", "alpha_pattern", "peft_type"})
_NO_MATTER: Final = frozenset(
    {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version", "bias"}
    | {"target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "lora_dropout"}
    | {
        "rank_pattern",
        "lora_bias",
        "fan_in_fan_out",
        "megatron_core",
        "ensure_weight_tying",
        "loftq_config",
        "eva_config",
    }
    | {"runtime_config", "init_lora_weights", "qalora_group_size"}
)
"""Fields that the tensors themselves answer, or that training alone reads.

PEFT puts `fan_in_fan_out` aside for linear layers, and the networks that are read here have no others that it is for.
"""
_MAX_STARS: Final = 2
_MAX_NAME: Final = 300
_MAX_ALPHA: Final = 1e9
_MERGE: Final = "merge the adapter where it was trained, with merge_and_unload(), and save the model"
_PLAIN_STARTS: Final = (True, False, None, "gaussian", "eva", "orthogonal")
"""Of `init_lora_weights`: those that leave the base as it is."""


def adapter_base(adapter: Files, base: str | None) -> str:
    """Return the base of an adapter: the operator's (`VIT_BASE`), else the one that its config names.

    Raises:
        CheckpointError: it is no LoRA adapter that is read, or nobody names its base.
    """
    where = adapter.where(ADAPTER_CONFIG)
    config = adapter.json(ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r:.100} is not read; LORA is")
    unknown = sorted(key for key, value in config.items() if value and key not in _READ | _NO_MATTER)
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        unknown.append(f"init_lora_weights {config['init_lora_weights']!r:.100}")
    if unknown:
        raise CheckpointError(f"{where}: {unknown[0]} is not read: {_MERGE}")
    named, revision = config.get("base_model_name_or_path"), config.get("revision")
    if base is None and (not isinstance(named, str) or not named):
        raise CheckpointError(f"{where}: base_model_name_or_path is missing: set VIT_BASE to the checkpoint it adapts")
    return base or (f"{named}@{revision}" if isinstance(revision, str) and revision else str(named))


def adapt(base: Files, adapter: Files) -> None:
    """Let a base give its tensors with an adapter merged into them.

    Raises:
        CheckpointError: the adapter has no weights that can be read.
    """
    where = f"{adapter.place} (base {base.place})"
    base.source, base.overlay = adapter.source, adapter
    config, changes = adapter.json(ADAPTER_CONFIG), _adapter_tensors(adapter)
    renaming: Renaming = dict
    if huggingface.recognises(base):
        mapping = config.get("auto_mapping")
        class_name = mapping.get("base_model_class") if isinstance(mapping, dict) else None
        head = next((tensor for name, tensor in changes.items() if name.endswith("classifier.weight")), None)
        classes = None if head is None or not head.ndim else head.shape[0]
        renaming = huggingface.adapted(base, PurePosixPath(adapter.place).name, class_name, classes)

    def merged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _merged(renaming(dict(tensors)), changes, config, renaming, where)

    base.merge = merged


def _adapter_tensors(adapter: Files) -> dict[str, Tensor]:
    path = adapter.path(_WEIGHTS)
    if path is not None:
        tensors = read_safetensors(path, adapter.where(_WEIGHTS))
    else:
        where = adapter.where(_PICKLE)
        tensors = chosen_state_dict(read_pickle(adapter.required(_PICKLE), where), None, where)[0]
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _merged(
    base: dict[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any], renaming: Renaming, where: str
) -> dict[str, Tensor]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        match = _LORA.fullmatch(name)
        if match is not None:
            pairs.setdefault(match[1], {})[f"{match[2]}.{match[3]}"] = tensor
        elif "lora_" in name:
            raise CheckpointError(f"{where}: {name!r} is not of plain LoRA: {_MERGE}")
        else:  # saved whole, as `modules_to_save` and `bias` ask for
            (saved,) = renaming({re.sub(r"\.(?:modules_to_save(?:\.default)?|base_layer)\.", ".", name): tensor})
            base[saved] = tensor
    if not pairs:
        raise CheckpointError(f"{where}: the adapter has no tensors of LoRA")
    for module, parts in pairs.items():
        (name,) = renaming({f"{module}.weight": next(iter(parts.values()))})
        bias = f"{name.removesuffix('weight')}bias"
        needed = {name, bias} if "B.bias" in parts else {name}
        if not needed <= base.keys() or not {"A.weight", "B.weight"} <= parts.keys():
            raise CheckpointError(f"{where}: the adapter changes {module!r}, which the base does not have, or in part")
        down, up = parts["A.weight"], parts["B.weight"]
        # Compared before they are multiplied: two long vectors would make a matrix of gigabytes.
        fits = up.ndim == down.ndim and up.shape[:1].numel() * down[0].numel() == base[name].numel()
        change = _change(down.float(), up.float()) if fits else None
        if change is None or change.shape != base[name].shape:
            shapes = f"{list(parts['A.weight'].shape)} and {list(parts['B.weight'].shape)}"
            raise CheckpointError(f"{where}: the adapter of {module!r}, {shapes}, is not for {list(base[name].shape)}")
        scale = _scale(config, module, parts["A.weight"].shape[0], where)
        base[name] = base[name].float() + change * scale
        if "B.bias" in parts:
            base[bias] = base[bias].float() + parts["B.bias"].float() * scale
    return base


def _change(down: Tensor, up: Tensor) -> Tensor | None:
    """Return B A, as a weight of a linear layer or of a convolution, or None where they do not fit together."""
    if up.ndim != down.ndim or up.ndim not in (2, 4) or up.shape[1] != down.shape[0]:
        return None
    if up.ndim == 4:
        return F.conv2d(down.transpose(0, 1), up).transpose(0, 1)
    return up @ down


def _scale(config: Mapping[str, Any], module: str, rank: int, where: str) -> float:
    patterns = config.get("alpha_pattern") or {}
    # PEFT's keys are regular expressions: few of them take exponential time, and those of models have `.*` at most.
    plain = isinstance(patterns, dict) and all(re.fullmatch(r"(?:[\w.]|\.\*){1,200}", str(key)) for key in patterns)
    if not plain or any(key.count("*") > _MAX_STARS for key in patterns) or len(module) > _MAX_NAME:
        raise CheckpointError(f"{where}: alpha_pattern is not of names of modules: {_MERGE}")
    found = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    alpha = found[0] if found else required(config, "lora_alpha", where)
    if not isinstance(alpha, int | float) or not abs(alpha) <= _MAX_ALPHA or not rank:
        raise CheckpointError(f"{where}: lora_alpha {alpha!r:.100}: expected a number")
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)
