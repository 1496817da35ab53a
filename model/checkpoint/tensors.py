"""The way from a file's names and layout of tensors to the model's: renaming, joining, checking."""

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from model.errors import CheckpointError

# Patterns of names and their replacements, applied in order. `model.network.vit` has the names that
# result.
Rules = Sequence[tuple[str, str]]

# Parts of the names of tensors that the model joins and files may keep apart: queries, keys and
# values; gates and values of a SwiGLU. The joined part comes first.
_JOINED: Final = (
    (".attn.qkv.", ".attn.q.", ".attn.k.", ".attn.v."),
    ("attn_pool.kv.", "attn_pool.k.", "attn_pool.v."),
    (".mlp.fc1.", ".mlp.fc1_g.", ".mlp.fc1_x."),
)
_DISTILLED: Final = (
    "state the right class: distilled, such as deit_tiny_distilled_patch16_224 and "
    "DeiTForImageClassificationWithTeacher, or not"
)
_FINAL_NORM: Final = (
    "global_pool=avg has fc_norm, global_pool=token has norm: correct global_pool "
    "(use_mean_pooling)"
)
# Remedies if tensors of a part are missing or unexpected, by the first word of their names.
_REMEDIES: Final = {
    "head": "the file has a head, the architecture has none: correct num_classes, or architectures",
    "dist_token": _DISTILLED,
    "head_dist": _DISTILLED,
    "distillation_classifier": _DISTILLED,
    "pre_logits": "this layer before the head is not computed: save the backbone without both as a "
    "folder, and fit a head on it with vitserve train --probe --from FOLDER",
    "fc_norm": _FINAL_NORM,
    "reg_token": "state the number of register tokens: reg_tokens (num_register_tokens)",
}
_LEAVE_OUT: Final = (
    'save without it; for a file of weights, --keys FILE (VIT_KEYS) with to = "" leaves it out'
)
# Numbers that change the scores, such as the scale of a cosine classifier.
SCALES: Final = re.compile(
    r"(?!blocks\.)(.*\.)?(temperature|temp|tau|((logit|log|cos|cosine)_)?scale|logit_bias)"
)
# Tensors that change the scores without being layers, and how to keep their effect.
_EFFECTS: Final = (
    (
        re.compile(r"(?!.*running_)(.*[._])?(mean|std)"),
        "pixel statistics of a normalisation within the network: write them as mean and std into "
        f"the file of --preprocess (VIT_PREPROCESS), and {_LEAVE_OUT}",
    ),
    (
        SCALES,
        "it changes the logits, and is not read: fit a temperature with vitserve calibrate, and "
        f"{_LEAVE_OUT}",
    ),
)
_UNCHANGED: Final[Mapping[str, str]] = MappingProxyType({})


def advice_on_effect(name: str) -> str:
    """Return how to keep the effect of a tensor that is not a layer's; empty for others."""
    return next((advice for pattern, advice in _EFFECTS if pattern.fullmatch(name)), "")


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of tensors: names, types, shapes and numbers, independent of order and file."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)} {tensor.layout}\n".encode())
        is_dense = tensor.layout == torch.strided and not tensor.is_quantized
        if is_dense and tensor.device.type == "cpu":
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def renamed(tensors: Mapping[str, Tensor], rules: Rules, where: str) -> dict[str, Tensor]:
    """Return tensors under new names.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = _new_name(name, rules)
        if new in result:
            raise CheckpointError(
                f"{where}: {name!r} and another tensor are both the model's {new!r}"
            )
        result[new] = tensor
    return result


def _new_name(name: str, rules: Rules) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def stored_names(names: Iterable[str], rules: Rules) -> dict[str, str]:
    """Return the file's names of tensors by the names that rules give them."""
    return {_new_name(name, rules): name for name in names}


def join(tensors: dict[str, Tensor], names: Sequence[str], joined: str) -> None:
    """Join tensors of equal shape along their first axis, in place.

    Nothing happens if one of them is missing or the joined tensor exists already.
    """
    parts = [tensors[name] for name in names if name in tensors]
    is_whole = len(parts) == len(names) and joined not in tensors
    if is_whole and len({part.shape for part in parts}) == 1 and parts[0].ndim:
        tensors[joined] = torch.cat(parts)
        for name in names:
            del tensors[name]


def join_parts(tensors: dict[str, Tensor], *, key_bias: bool = True) -> None:
    """Join, in place, the tensors whose parts `_JOINED` lists.

    Args:
        tensors: tensors by the names that rules lead to.
        key_bias: whether keys have a bias of their own; if not, it is zero.
    """
    for joined, *apart in _JOINED:
        for name in [name for name in tensors if apart[0] in name]:
            parts = [name.replace(apart[0], part) for part in apart]
            if not key_bias and name.endswith(".attn.q.bias"):
                if parts[1] in tensors:
                    continue  # an unexpected bias keeps its name, and is refused
                tensors[parts[1]] = torch.zeros_like(tensors[name])
            join(tensors, parts, name.replace(apart[0], joined))


def take_tensor(
    tensors: dict[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    where: str,
    stored: Mapping[str, str] = _UNCHANGED,
) -> Tensor:
    """Remove a tensor and return it as contiguous float32.

    Args:
        tensors: tensors by name.
        name: name of the tensor.
        shape: expected shape.
        where: name of the file in messages.
        stored: the file's names by the model's names, if they differ.

    Raises:
        CheckpointError: missing, of another shape, not floating point, or sparse.
    """
    if name not in tensors:
        raise CheckpointError(
            f"{where}: missing key {_stored_name(name, stored)!r}: save all of model.state_dict(), "
            "or correct the architecture that asks for it"
        )
    stored_shape = tuple(tensors[name].shape)
    if stored_shape != shape:
        raise CheckpointError(
            f"{where}: {_stored_name(name, stored)} has shape {list(stored_shape)}, expected "
            f"{list(shape)}: {_remedy_of_shape(name)}"
        )
    tensor = tensors.pop(name)
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{where}: {_stored_name(name, stored)} is {tensor.dtype}, expected floating point, "
            "and dense: save weights in floating point; quantised and sparse ones are not read"
        )
    return tensor.to(torch.float32).contiguous()


def _remedy_of_shape(name: str) -> str:
    if name.startswith("head"):
        return "correct the number of classes of the architecture (num_classes), or save its head"
    if "pos_embed" in name:
        return (
            "correct the image size of the architecture to that of these positions; then "
            "--image-size (VIT_IMAGE_SIZE) resizes them"
        )
    return (
        "the architecture is of another model: correct its sizes (embed_dim, patch_size, "
        "mlp_ratio; in transformers hidden_size, patch_size, intermediate_size), or give its "
        "weights"
    )


def require_finite(
    tensors: Mapping[str, Tensor], where: str, stored: Mapping[str, str] = _UNCHANGED
) -> None:
    """Raise `CheckpointError` for a tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{where}: {stored.get(name, name)} holds values that are not finite: give a "
                "checkpoint from before the training diverged"
            )


def checked(
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    stored: Mapping[str, str] = _UNCHANGED,
) -> dict[str, Tensor]:
    """Return tensors as float32 once their names and shapes are exactly these.

    Each shape is checked before any arithmetic, so memory stays bounded by the network's size.

    Args:
        tensors: tensors by the model's names.
        shapes: expected shapes by the model's names.
        where: name of the file in messages.
        stored: the file's names by the model's names, if they differ.

    Raises:
        CheckpointError: one is missing, unexpected, of another shape or not floating point; it
            names the first, and the remedy.
    """
    missing = sorted(shapes.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - shapes.keys())
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            effect = next(filter(None, map(advice_on_effect, unexpected)), None)
            remedy = effect or _remedy_of_names(missing, unexpected, shapes, stored)
            shown = _stored_name(names[0], stored)
            raise CheckpointError(f"{where}: {kind} key {shown!r}{more}: {remedy}")
    left = dict(tensors)
    return {name: take_tensor(left, name, shape, where, stored) for name, shape in shapes.items()}


def _remedy_of_names(
    missing: Sequence[str],
    unexpected: Sequence[str],
    expected: Collection[str],
    stored: Mapping[str, str],
) -> str:
    """Return what to do about tensors that are missing, unexpected, or both."""
    blocks = _blocks((set(expected) - set(missing)) | set(unexpected))
    depth = len(_blocks(expected))
    if blocks and len(blocks) != depth and blocks == set(range(len(blocks))):
        # Only transformers' files have names of their own.
        argument = f"depth={len(blocks)} (VIT_ARCHITECTURE, or model_args of config.json)"
        if stored:
            argument = "num_hidden_layers in config.json"
        return (
            f"the file has {len(blocks)} blocks, the architecture {depth}: correct {argument}, or "
            "give the weights of that model"
        )
    for name in (*unexpected, *missing):
        part = name.partition(".")[0]
        if part in _REMEDIES and (part != "head" or name in unexpected):
            return _REMEDIES[part]
    first = (missing or unexpected)[0]
    near = get_close_matches(first, unexpected, 1) if missing else []
    if near:
        return (
            f"its name is near {_stored_name(near[0], stored)!r}: if that is the same tensor, "
            "rename it, or give the file of weights alone with --keys FILE (VIT_KEYS)"
        )
    weight = f"{first.removesuffix('.bias')}.weight"
    if first in missing and first.endswith(".bias") and weight not in missing:
        return "if the layer has no bias, save zeros under this name; else save the whole model"
    if missing:
        return (
            "save all of model.state_dict(), if the file is a part of the model; else correct the "
            "architecture, which has this layer"
        )
    return f"the architecture lacks this part: correct the architecture, or {_LEAVE_OUT}"


def _blocks(names: Iterable[str]) -> set[int]:
    return {int(name.split(".")[1]) for name in names if re.match(r"blocks\.\d+\.", name)}


def _stored_name(name: str, stored: Mapping[str, str]) -> str:
    """Return the file's name of a tensor; for a missing tensor, guess from neighbouring names."""
    if name in stored:
        return stored[name]
    module, _, kind = name.rpartition(".")
    other_kind = {"weight": "bias", "bias": "weight"}.get(kind, kind)
    neighbour = stored.get(f"{module}.{other_kind}")
    if neighbour is not None:
        return f"{neighbour.rpartition('.')[0]}.{kind}"
    number = re.search(r"\.\d+\.", name)
    if number is None:
        return name
    for ours, theirs in stored.items():
        if re.sub(r"\.\d+\.", number[0], ours, count=1) == name:
            return re.sub(r"\.\d+\.", number[0], theirs, count=1)
    return name
