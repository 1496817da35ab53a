"""Heads that people put onto a backbone: a linear layer under one of many names, by itself or in a
`Sequential`.

torchvision's `model.heads = nn.Linear(768, 3)`, `classifier = nn.Sequential(nn.Dropout(),
nn.Linear(768, 3))` and DINOv2's `linear_head` are read. A layer under another name that could be a
head is named in the refusal.
"""

import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.errors import CheckpointError

_NAMES: Final = (
    r"heads?|classifiers?|fc|cls|linear|linear_head|mlp_head|cls_head|class_head|classification_head|last_layer|"
    r"linear_classifier|classifier_head|fc_head|output|out|output_layer|final_layer|logits"
)
_HEAD: Final = re.compile(rf"(?P<part>{_NAMES})(?:\.\w+)*\.weight")
# First parts of the names of a network's own tensors.
_OF_NETWORK: Final = frozenset(
    {
        "blocks",
        "patch_embed",
        "norm",
        "norm_pre",
        "fc_norm",
        "cls_token",
        "pos_embed",
        "reg_token",
        "register_tokens",
    }
    | {
        "dist_token",
        "head_dist",
        "attn_pool",
        "rel_pos_bias",
        "shared",
        "rope",
        "vision_model",
        "pre_logits",
        "head",
    }
)


def with_head(
    tensors: Mapping[str, Tensor], where: str, folders_name: str = ""
) -> dict[str, Tensor]:
    """Return tensors with the only linear layer that can be the head under the head's name.

    Args:
        tensors: by the model's names, but for the head.
        where: what messages call the file.
        folders_name: of the head in a folder, where names are not mapped; empty for a plain state
        dict.

    Raises:
        CheckpointError: the head has several layers, or a layer under another name is likely to be
        the head.
    """
    norm = tensors.get("blocks.0.norm1.weight")
    if "head.weight" in tensors or norm is None or norm.ndim != 1:
        return dict(tensors)
    width = len(norm)
    heads = [name for name in _layers(tensors) if _HEAD.fullmatch(name)]
    parts = {name.partition(".")[0] for name in heads}
    if len(heads) > 1 and len(parts) == 1:
        raise CheckpointError(
            f"{where}: the head has several layers, {' and '.join(_shown(tensors, name) for name in heads)}: a head of "
            "one linear layer is read: fit one on this backbone with vitserve train --probe"
        )
    if len(heads) == 1 and _is_head(tensors[heads[0]], width):
        weight = heads[0]
        renamed = {weight: "head.weight", weight.removesuffix("weight") + "bias": "head.bias"}
        return {renamed.get(name, name): tensor for name, tensor in tensors.items()}
    likely = [name for name in _layers(tensors) if _is_head(tensors[name], width)]
    if likely:
        raise CheckpointError(f"{where}: {_advice(tensors, likely, folders_name)}")
    deep = next((name for name in heads if tensors[name].shape[1] % width == 0), None)
    if deep is not None:
        raise CheckpointError(
            f"{where}: the head {_shown(tensors, deep)} reads {tensors[deep].shape[1] // width} x {width} features: "
            "features of the last block are read, of CLS or of CLS and the mean of the patches"
        )
    return dict(tensors)


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights of linear layers that are no part of the network itself."""
    return [
        name
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and tensor.ndim == 2
        and (name.partition(".")[0] not in _OF_NETWORK or _HEAD.fullmatch(name))
    ]


def _is_head(weight: Tensor, width: int) -> bool:
    """Return whether a layer reads the CLS token, or CLS and the mean of the patches, as DINOv2's."""
    return weight.shape[0] > 0 and weight.shape[1] in (width, 2 * width)


def _shown(tensors: Mapping[str, Tensor], name: str) -> str:
    return f"{name!r:.100} {list(tensors[name].shape)}"


def _advice(tensors: Mapping[str, Tensor], likely: list[str], folders_name: str) -> str:
    """Return a refusal that names the layer, with what makes it the head: a key map, or another
    name.
    """
    weight = likely[0]
    others = (
        f" (or {', '.join(_shown(tensors, name) for name in likely[1:3])})"
        if len(likely) > 1
        else ""
    )
    found = f"{_shown(tensors, weight)} is likely the head{others}"
    if folders_name:
        return f"{found}: if so, save the layer as {folders_name!r}, as the class that the config names has it"
    bias = weight.removesuffix("weight") + "bias"
    pairs = {weight: "head.weight"} | ({bias: "head.bias"} if bias in tensors else {})
    lines = ", ".join(f'{{from = "{name}", to = "{new}"}}' for name, new in pairs.items())
    return f"{found}: if so, write this line into keys.toml, and give --keys keys.toml (VIT_KEYS): tensor = [{lines}]"
