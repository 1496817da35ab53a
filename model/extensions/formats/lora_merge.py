"""The merge of a LoRA adapter into the tensors of its base: W + B A alpha / r."""

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
_LORA: Final = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")
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
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in adapter.items():
        match = _LORA.fullmatch(name)
        if match is not None:
            pairs.setdefault(match[1], {})[match[2]] = tensor
        elif "lora_" in name:
            raise CheckpointError(f"{where}: {name!r} is not of plain LoRA: {MERGE}")
        else:  # a whole tensor, because of `modules_to_save` or `bias`
            base |= renaming({_WHOLE.sub(".", name): tensor})
    if not pairs:
        raise CheckpointError(f"{where}: the adapter has no tensors of LoRA")
    for module, pair in pairs.items():
        scale = _scale(config, module, pair, where)
        change = _change(pair)
        [target] = renaming({f"{module}.weight": pair["B"]})
        if target not in base:
            raise CheckpointError(
                f"{where}: the adapter changes {module!r}, which the base does not have: "
                f"{_OTHER_BASE}"
            )
        if change is None or change.shape != base[target].shape:
            shapes = ", ".join(str(list(part.shape)) for part in pair.values())
            raise CheckpointError(
                f"{where}: the adapter of {module!r}, {shapes}, is not for "
                f"{list(base[target].shape)}: {_OTHER_BASE}"
            )
        base[target] = base[target].float() + change * scale
    return base


def _change(pair: Mapping[str, Tensor]) -> Tensor | None:
    """Return B A as the weight of a linear layer or of a convolution; None if they do not fit."""
    down = pair["A"].float()
    up = pair["B"].float()
    if up.ndim != down.ndim or up.ndim not in (2, 4) or up.shape[1] != down.shape[0]:
        return None
    if up.ndim == 4:
        return F.conv2d(down.transpose(0, 1), up).transpose(0, 1)
    return up @ down


def _scale(config: Mapping[str, Any], module: str, pair: Mapping[str, Tensor], where: str) -> float:
    if not {"A", "B"} <= pair.keys():
        raise CheckpointError(
            f"{where}: the adapter changes {module!r} in part: A or B is missing; save it again"
        )
    patterns = config.get("alpha_pattern") or {}
    is_plain = isinstance(patterns, dict) and all(map(_PLAIN_PATTERN.fullmatch, map(str, patterns)))
    if not is_plain:
        raise CheckpointError(f"{where}: alpha_pattern is not of names of modules: {MERGE}")
    alphas = [alpha for key, alpha in patterns.items() if re.match(rf"(.*\.)?({key})$", module)]
    alpha = alphas[0] if alphas else required(config, "lora_alpha", where)
    rank = pair["A"].shape[0] if pair["A"].ndim else 0
    if not isinstance(alpha, int | float) or not rank:
        raise CheckpointError(f"{where}: lora_alpha {alpha!r:.100}: expected a number")
    return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)
