"""The merge of a LoRA adapter into the tensors of its base: W + B A alpha / r.

With DoRA, each row of the sum then gets the norm that the adapter states (Liu et al. 2024,
https://arxiv.org/abs/2402.09353).
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch.nn.functional as F
from torch import Tensor

from model.checkpoint.local_files import required
from model.errors import CheckpointError

# Adapters are saved under the names of a library's files, or the names that it has in memory. A
# renaming maps both to the same names.
Renaming = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_OTHER_BASE: Final = (
    "if the base is another model than in training, set VIT_BASE (--base) to the right one"
)
MERGE: Final = "merge the adapter where it was trained, with merge_and_unload(), and save the model"
_LORA: Final = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|magnitude_vector)(?:\.default)?(?:\.(?:weight|(?P<bias>bias)))?"
)
# Fields of `adapter_config.json` that add a part to each changed layer, and the parts.
_EXTRA_PARTS: Final = {"use_dora": "magnitude_vector", "lora_bias": "B.bias"}
_MAX_ALPHA: Final = 1e9
_WHOLE: Final = re.compile(r"\.(?:modules_to_save(?:\.default)?|base_layer)\.")
# Parts of the names of layers that are not a head.
_TRUNK: Final = re.compile(
    r"(?:^|\.)(?:layers?|blocks?|stages?|encoder|stem|embeddings|patch_embed|pooler|attn_pool|"
    r"pre_logits|vision_model|text_model|\w*projection)\."
)
# PEFT's keys are regular expressions. Few of them take exponential time, and the keys for real
# models have `.*` at most.
_PLAIN_PATTERN: Final = re.compile(r"[\w.]+(?:\.\*[\w.]*)?")


def head_of(adapter: Mapping[str, Tensor]) -> Tensor | None:
    """Return the weight of the head that an adapter replaces as a whole, or None."""
    for name, tensor in adapter.items():
        plain_name = _WHOLE.sub(".", name)
        is_weight = plain_name.endswith(".weight") and tensor.ndim > 1
        if is_weight and "lora_" not in plain_name and _TRUNK.search(plain_name) is None:
            return tensor
    return None


def merged(
    base: dict[str, Tensor],
    adapter: Mapping[str, Tensor],
    config: Mapping[str, Any],
    renaming: Renaming,
    where: str,
) -> dict[str, Tensor]:
    """Return the base's tensors with the adapter's merged in.

    Args:
        base: tensors of the base, under the renaming's names.
        adapter: tensors of the adapter, under its own names.
        config: content of its `adapter_config.json`.
        renaming: function from the adapter's names to the base's.
        where: name of both in messages.

    Raises:
        CheckpointError: the adapter has tensors that are not plain LoRA or do not fit the base.
    """
    parts_by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        match = _LORA.fullmatch(name)
        if match is not None:
            part = match["part"] + (".bias" if match["bias"] else "")
            parts_by_module.setdefault(match["module"], {})[part] = tensor
        elif "lora_" in name:
            raise CheckpointError(f"{where}: {name!r} is not of plain LoRA: {MERGE}")
        else:  # a whole tensor, because of `modules_to_save` or `bias`
            base |= renaming({_WHOLE.sub(".", name): tensor})
    if not parts_by_module:
        raise CheckpointError(f"{where}: the adapter has no tensors of LoRA")
    for module, parts in parts_by_module.items():
        _require_parts(parts, config, f"{where}: the adapter changes {module!r}")
        scale = _scale(config, module, parts["A"], where)
        changes = {"weight": _change(parts)}
        if "B.bias" in parts:
            changes["bias"] = parts["B.bias"]
        for kind, change in changes.items():
            [target] = renaming({f"{module}.{kind}": parts["B"]})
            fitting = _fitting(change, base.get(target), f"{where}: {module!r}")
            changed = base[target].float() + fitting.float() * scale
            if kind == "weight" and "magnitude_vector" in parts:
                changed = _with_norms(changed, parts["magnitude_vector"], where)
            base[target] = changed
    return base


def _fitting(change: Tensor | None, target: Tensor | None, what: str) -> Tensor:
    """Return the change of a tensor of the base; refuse one that is not for this tensor."""
    if target is None:
        raise CheckpointError(
            f"{what}: the adapter changes it, and the base does not have it: {_OTHER_BASE}"
        )
    if change is None or change.shape != target.shape:
        raise CheckpointError(
            f"{what}: the adapter's change is not for a tensor of shape {list(target.shape)}: "
            f"{_OTHER_BASE}"
        )
    return change


def _require_parts(parts: Mapping[str, Tensor], config: Mapping[str, Any], what: str) -> None:
    """Refuse a layer that lacks a part, or has one that the config does not state."""
    expected = {"A", "B"} | {part for field, part in _EXTRA_PARTS.items() if config.get(field)}
    for part in sorted(parts.keys() ^ expected):
        problem = "is missing: save it again"
        if part in parts:
            problem = f"is not stated by {' or '.join(_EXTRA_PARTS)} in adapter_config.json"
        raise CheckpointError(f"{what} in part: lora_{part} {problem}")


def _with_norms(weight: Tensor, norms: Tensor, where: str) -> Tensor:
    """Return a weight whose rows have these norms, as DoRA does for linear and other layers."""
    if norms.numel() != len(weight):
        raise CheckpointError(
            f"{where}: a magnitude of {norms.numel()} numbers is not for {list(weight.shape)}: "
            f"{_OTHER_BASE}"
        )
    factors = norms.float().flatten() / weight.flatten(1).norm(dim=1)
    scaled: Tensor = weight * factors.reshape(-1, *[1] * (weight.ndim - 1))
    return scaled


def _change(parts: Mapping[str, Tensor]) -> Tensor | None:
    """Return B A as the weight of a linear layer or of a convolution; None if they do not fit."""
    down = parts["A"].float()
    up = parts["B"].float()
    if up.ndim != down.ndim or up.ndim not in (2, 4) or up.shape[1] != down.shape[0]:
        return None
    if up.ndim == 4:
        if up.shape[2:] != (1, 1):
            return None
        return F.conv2d(down.transpose(0, 1), up).transpose(0, 1)
    return up @ down


def _scale(config: Mapping[str, Any], module: str, down: Tensor, where: str) -> float:
    """Return alpha / r of a layer; rank-stabilised LoRA divides by the root of r."""
    patterns = config.get("alpha_pattern") or {}
    is_plain = isinstance(patterns, dict) and all(map(_PLAIN_PATTERN.fullmatch, map(str, patterns)))
    if not is_plain:
        raise CheckpointError(f"{where}: alpha_pattern is not of names of modules: {MERGE}")
    alphas = [alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    alpha = alphas[0] if alphas else required(config, "lora_alpha", where)
    rank = down.shape[0] if down.ndim else 0
    if not config.get("rank_pattern") and config.get("r") not in (None, rank):
        raise CheckpointError(
            f"{where}: r is {config['r']!r:.100}, but the adapter of {module!r} has {rank}: give "
            "the adapter_config.json of this adapter"
        )
    # A comparison, unlike a division, takes an integer of any size, and is false for NaN.
    if not isinstance(alpha, int | float) or not abs(alpha) < _MAX_ALPHA or not rank:
        raise CheckpointError(f"{where}: lora_alpha {alpha!r:.100}: expected a number")
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)
