"""Heads that people put onto a backbone: a linear layer under one of many names.

The layer may stand alone, as torchvision's `model.heads = nn.Linear(768, 3)` and DINOv2's
`linear_head`, or in a sequence, as `classifier = nn.Sequential(nn.Dropout(), nn.Linear(768, 3))`.
A layer under another name that could be a head is named in the refusal.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
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
HEAD: Final = re.compile(rf"(?P<part>{_NAMES})(?:\.\w+)*\.weight")
# `running_mean` of a batch norm in a sequence, as of MAE's linear probe.
_BATCH_NORM: Final = re.compile(
    rf"(?P<sequence>(?:{_NAMES})(?:\.\w+)*)\.(?P<number>\d+)\.running_mean"
)
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
    tensors: Mapping[str, Tensor],
    files: Files,
    stored: Mapping[str, str],
    library_name: str = "",
) -> dict[str, Tensor]:
    """Return tensors whose head has the model's names, with zeros for a bias if it lacks one.

    A batch norm right before the head's layer is folded into the layer.

    Args:
        tensors: tensors by the model's names, except the head's.
        files: files of the checkpoint.
        stored: the file's names by the model's names.
        library_name: the library's name of the head, for folders; empty for a plain state dict.

    Raises:
        CheckpointError: the head has several layers or a norm, or a layer under another name is
            likely to be the head.
    """
    tensors = _with_norm_in_layer(tensors, files)
    result = _Head(tensors, files.title, stored, library_name).renamed()
    return with_bias(result, "head", files)


def with_bias(tensors: Mapping[str, Tensor], layer: str, files: Files) -> dict[str, Tensor]:
    """Return tensors with zeros for the bias that a linear layer lacks."""
    result = dict(tensors)
    weight = result.get(f"{layer}.weight")
    if weight is not None and weight.ndim == 2 and f"{layer}.bias" not in result:
        result[f"{layer}.bias"] = torch.zeros(len(weight))
        files.assumed += ("head: a layer without a bias, because the file has none",)
    return result


def _with_norm_in_layer(tensors: Mapping[str, Tensor], files: Files) -> dict[str, Tensor]:
    """Return tensors whose batch norm right before the head's layer is folded into the layer."""
    result = dict(tensors)
    match = next(filter(None, map(_BATCH_NORM.fullmatch, tensors)), None)
    if match is None:
        return result
    norm = f"{match['sequence']}.{match['number']}"
    layer = f"{match['sequence']}.{int(match['number']) + 1}"
    weight = tensors.get(f"{layer}.weight")
    mean = tensors[f"{norm}.running_mean"].float()
    scale = tensors.get(f"{norm}.weight", torch.ones_like(mean)).float()
    shift = tensors.get(f"{norm}.bias", torch.zeros_like(mean)).float()
    variance = tensors.get(f"{norm}.running_var")
    if weight is None or variance is None or weight.ndim != 2:
        return result
    if {mean.shape, variance.shape, scale.shape, shift.shape} != {weight.shape[1:]}:
        return result
    # MAE's norm lacks factors; other code uses the default of torch.
    eps = 1e-5 if f"{norm}.weight" in tensors else 1e-6
    factors = scale / (variance.float() + eps).sqrt()
    bias = tensors.get(f"{layer}.bias", torch.zeros(len(weight))).float()
    result[f"{layer}.weight"] = weight.float() * factors
    result[f"{layer}.bias"] = bias + weight.float() @ (shift - mean * factors)
    for kind in ("running_mean", "running_var", "weight", "bias"):
        result.pop(f"{norm}.{kind}", None)
    files.assumed += (f"head: its batch norm {norm} has eps={eps}, and is folded into the layer",)
    return result


@dataclass(frozen=True)
class _Head:
    """The tensors that can be the head of a network; for the fields see `with_head`."""

    tensors: Mapping[str, Tensor]
    where: str
    stored: Mapping[str, str]
    library_name: str

    def renamed(self) -> dict[str, Tensor]:
        """Rename the only linear layer that can be the head to the model's name of the head.

        Raises:
            CheckpointError: as `with_head`.
        """
        tensors = self.tensors
        norm = tensors.get("blocks.0.norm1.weight")
        if "head.weight" in tensors or norm is None or norm.ndim != 1 or not len(norm):
            return dict(tensors)
        width = len(norm)
        layers = _layers(tensors)
        heads = [name for name in layers if HEAD.fullmatch(name)]
        if len(heads) > 1 and len({name.partition(".")[0] for name in heads}) == 1:
            shown = " and ".join(map(self._shown, heads))
            raise CheckpointError(
                f"{self.where}: the head has several layers, {shown}, but only one linear layer is "
                f"read: {self._way_to_new_head(heads[0])}"
            )
        if len(heads) == 1 and _reads_features(tensors[heads[0]], width):
            weight = heads[0]
            self._refuse_norm_before(weight)
            new_names = {weight: "head.weight", _bias_of(weight): "head.bias"}
            return {new_names.get(name, name): tensor for name, tensor in tensors.items()}
        likely = [name for name in layers if _reads_features(tensors[name], width)]
        if likely:
            raise CheckpointError(f"{self.where}: {self._advice(likely)}")
        for name in heads:
            count, rest = divmod(tensors[name].shape[1], width)
            if rest == 0:
                raise CheckpointError(
                    f"{self.where}: the head {self._shown(name)} reads {count} x {width} features, "
                    "but only heads are supported that read CLS, or CLS and the mean of the "
                    "patches, of the last block"
                )
        return dict(tensors)

    def _refuse_norm_before(self, weight: str) -> None:
        """Refuse a norm in the head; give a key map if it can be the missing final norm."""
        tensors = self.tensors
        of_norms = (
            name
            for name in self._of_part(weight)
            if name.endswith((".weight", ".running_mean")) and tensors[name].ndim == 1
        )
        of_norm = next(of_norms, None)
        if of_norm is None:
            return
        norm = of_norm.rpartition(".")[0]
        message = (
            f"{self.where}: the head has a norm, {self._shown(of_norm)}, before its "
            f"linear layer {self._shown(weight)}"
        )
        has_final_norm = "norm.weight" in tensors or "fc_norm.weight" in tensors
        is_layer_norm = f"{norm}.bias" in tensors and f"{norm}.running_mean" not in tensors
        if has_final_norm or self.library_name or not is_layer_norm:
            raise CheckpointError(
                f"{message}, but only one linear layer is read: {self._way_to_new_head(weight)}"
            )
        key_map = self._key_map({f"{norm}.{kind}": f"norm.{kind}" for kind in ("weight", "bias")})
        raise CheckpointError(
            f"{message}: if the head reads the CLS token, this is the final norm, computed with "
            "the eps of the others (norm_eps): write this line into keys.toml, and give --keys "
            f"keys.toml (VIT_KEYS): {key_map}"
        )

    def _way_to_new_head(self, weight: str) -> str:
        """Return how to serve the backbone with a head of one layer instead of this head."""
        fit = "and fit a head on it with vitserve train --probe --from FOLDER"
        if self.library_name:
            return f"save the backbone as a folder, {fit}"
        key_map = self._key_map(dict.fromkeys(self._of_part(weight), ""))
        return (
            f"write this line into keys.toml: {key_map}; write the backbone as a folder, vitserve "
            "convert FILE --keys keys.toml --architecture A,num_classes=0 --preprocess P -o "
            f"FOLDER, {fit}"
        )

    def _advice(self, likely: list[str]) -> str:
        """Return a refusal that names the layer, and how to make it the head."""
        weight = likely[0]
        others = ""
        if len(likely) > 1:
            others = f" (or {', '.join(map(self._shown, likely[1:3]))})"
        layer = f"{self._shown(weight)} is likely the head{others}: if so"
        if self.library_name:
            return (
                f"{layer}, save the layer as {self.library_name!r}, the name in the class that "
                "the config names"
            )
        names = {weight: "head.weight"}
        if _bias_of(weight) in self.tensors:
            names[_bias_of(weight)] = "head.bias"
        return (
            f'{layer}, write this line into keys.toml (if not, with to = "" to leave it out), and '
            f"give --keys keys.toml (VIT_KEYS): {self._key_map(names)}"
        )

    def _of_part(self, weight: str) -> list[str]:
        """Return the names of the tensors of the part that a weight belongs to."""
        part = weight.partition(".")[0]
        return [name for name in self.tensors if name.startswith(f"{part}.")]

    def _shown(self, name: str) -> str:
        return f"{self.stored.get(name, name)!r:.100} {list(self.tensors[name].shape)}"

    def _key_map(self, new_names: Mapping[str, str]) -> str:
        """Return one line of a file of `VIT_KEYS` that gives tensors new names."""
        entries = (
            f"{{from = {json.dumps(self.stored.get(name, name))}, to = {json.dumps(new_name)}}}"
            for name, new_name in new_names.items()
        )
        return f"tensor = [{', '.join(entries)}]"


def _bias_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}bias"


def _layers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the weights of linear layers that do not belong to the network itself."""
    return [
        name
        for name, tensor in tensors.items()
        if name.endswith(".weight")
        and tensor.ndim == 2
        and (name.partition(".")[0] not in _OF_NETWORK or HEAD.fullmatch(name))
    ]


def _reads_features(weight: Tensor, width: int) -> bool:
    """Return whether a layer reads the CLS token, or CLS and the mean of the patches (DINOv2)."""
    return weight.shape[0] > 0 and weight.shape[1] in (width, 2 * width)
