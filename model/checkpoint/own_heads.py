"""Heads that people put onto a backbone: a linear layer under one of many names.

The layer may stand alone, as torchvision's `model.heads = nn.Linear(768, 3)` and DINOv2's
`linear_head`, or in a sequence, as `classifier = nn.Sequential(nn.Dropout(), nn.Linear(768, 3))`.
A layer under another name that could be a head is named in the refusal.
"""

import re
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from model.checkpoint.files import Files
from model.errors import CheckpointError

_NAMES: Final = (
    r"heads?|classifiers?|fc|cls|linear|linear_head|mlp_head|cls_head|class_head|"
    r"classification_head|last_layer|linear_classifier|classifier_head|fc_head|output|out|"
    r"output_layer|final_layer|logits"
)
_HEAD: Final = re.compile(rf"(?P<part>{_NAMES})(?:\.\w+)*\.weight")
# First parts of the names of a network's own tensors.
_OF_NETWORK: Final = frozenset(
    {
        "attn_pool",
        "blocks",
        "cls_token",
        "dist_token",
        "fc_norm",
        "head",
        "head_dist",
        "norm",
        "norm_pre",
        "patch_embed",
        "pos_embed",
        "pre_logits",
        "reg_token",
        "register_tokens",
        "rel_pos_bias",
        "rope",
        "shared",
        "vision_model",
    }
)


def with_head(
    tensors: Mapping[str, Tensor], files: Files, library_name: str = ""
) -> dict[str, Tensor]:
    """Give the head the model's names, and a bias of zeros if the file lacks one.

    Args:
        tensors: tensors by the model's names, but for the head.
        files: files of the checkpoint.
        library_name: the library's name of the head, for folders; empty for a plain state dict.

    Raises:
        CheckpointError: the head has several layers or a norm, or a layer under another name is
            likely to be the head.
    """
    result = _renamed(tensors, files.title, library_name)
    weight = result.get("head.weight")
    if weight is not None and weight.ndim == 2 and "head.bias" not in result:
        result["head.bias"] = torch.zeros(len(weight))
        files.assumed += ("head: a layer without a bias, because the file has none",)
    return result


def _renamed(tensors: Mapping[str, Tensor], where: str, library_name: str) -> dict[str, Tensor]:
    """Rename the only linear layer that can be the head to the model's name of the head.

    Raises:
        CheckpointError: the head has several layers or a norm, or a layer under another name is
            likely to be the head.
    """
    norm = tensors.get("blocks.0.norm1.weight")
    if "head.weight" in tensors or norm is None or norm.ndim != 1 or not len(norm):
        return dict(tensors)
    width = len(norm)
    layers = _layers(tensors)
    heads = [name for name in layers if _HEAD.fullmatch(name)]
    if len(heads) > 1 and len({name.partition(".")[0] for name in heads}) == 1:
        shown = " and ".join(_shown(tensors, name) for name in heads)
        raise CheckpointError(
            f"{where}: the head has several layers, {shown}: a head of one linear layer is read: "
            "fit one on this backbone with vitserve train --probe"
        )
    if len(heads) == 1 and _reads_features(tensors[heads[0]], width):
        weight = heads[0]
        _refuse_norm_before(tensors, weight, where, library_name)
        new_names = {weight: "head.weight", f"{weight.removesuffix('weight')}bias": "head.bias"}
        return {new_names.get(name, name): tensor for name, tensor in tensors.items()}
    likely = [name for name in layers if _reads_features(tensors[name], width)]
    if likely:
        raise CheckpointError(f"{where}: {_advice(tensors, likely, library_name)}")
    for name in heads:
        count, rest = divmod(tensors[name].shape[1], width)
        if rest == 0:
            raise CheckpointError(
                f"{where}: the head {_shown(tensors, name)} reads {count} x {width} features: "
                "features of the last block are read, of CLS or of CLS and the mean of the patches"
            )
    return dict(tensors)


def _refuse_norm_before(
    tensors: Mapping[str, Tensor], weight: str, where: str, library_name: str
) -> None:
    """Refuse a norm in the head; it can be the final norm of a network without another one.

    Args:
        tensors: tensors by the model's names, but for the head.
        weight: name of the weight of the head's linear layer.
        where: name of the file in messages.
        library_name: as in `with_head`.

    Raises:
        CheckpointError: the head has a norm.
    """
    part = weight.partition(".")[0]
    norm = next(
        (
            name.removesuffix(".weight")
            for name, tensor in tensors.items()
            if name.startswith(f"{part}.") and name.endswith(".weight") and tensor.ndim == 1
        ),
        None,
    )
    if norm is None:
        return
    message = (
        f"{where}: the head has a norm, {_shown(tensors, f'{norm}.weight')}, before its linear "
        f"layer {_shown(tensors, weight)}"
    )
    has_final_norm = "norm.weight" in tensors or "fc_norm.weight" in tensors
    is_layer_norm = f"{norm}.bias" in tensors and f"{norm}.running_mean" not in tensors
    if has_final_norm or library_name or not is_layer_norm:
        raise CheckpointError(
            f"{message}, and a linear layer alone is read: save the backbone as a folder, and fit "
            "a head on it with vitserve train --probe --from FOLDER"
        )
    lines = ", ".join(
        f'{{from = "{norm}.{kind}", to = "norm.{kind}"}}' for kind in ("weight", "bias")
    )
    raise CheckpointError(
        f"{message}: if the head reads the CLS token, this is the final norm: write this line into "
        f"keys.toml, and give --keys keys.toml (VIT_KEYS): tensor = [{lines}]"
    )


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights of linear layers that do not belong to the network itself."""
    return [
        name
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and tensor.ndim == 2
        and (name.partition(".")[0] not in _OF_NETWORK or _HEAD.fullmatch(name))
    ]


def _reads_features(weight: Tensor, width: int) -> bool:
    """Return whether a layer reads the CLS token, or CLS and the mean of the patches (DINOv2)."""
    return weight.shape[0] > 0 and weight.shape[1] in (width, 2 * width)


def _shown(tensors: Mapping[str, Tensor], name: str) -> str:
    return f"{name!r:.100} {list(tensors[name].shape)}"


def _advice(tensors: Mapping[str, Tensor], likely: list[str], library_name: str) -> str:
    """Return a refusal that names the layer, and how to make it the head: a key map, or a name."""
    weight = likely[0]
    others = ""
    if len(likely) > 1:
        others = f" (or {', '.join(_shown(tensors, name) for name in likely[1:3])})"
    layer = f"{_shown(tensors, weight)} is likely the head{others}: if so"
    if library_name:
        return (
            f"{layer}, save the layer as {library_name!r}, the name in the class that the config "
            "names"
        )
    names = {weight: "head.weight"}
    bias = weight.removesuffix("weight") + "bias"
    if bias in tensors:
        names[bias] = "head.bias"
    lines = ", ".join(f'{{from = "{old}", to = "{new}"}}' for old, new in names.items())
    return (
        f"{layer}, write this line into keys.toml, and give --keys keys.toml (VIT_KEYS): "
        f"tensor = [{lines}]"
    )
