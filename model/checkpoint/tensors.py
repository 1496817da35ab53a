"""The way from a file's names and layout of tensors to the model's: renaming, joining, checking."""

import hashlib
import re
from collections.abc import Mapping, Sequence
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
        CheckpointError: two would have one name.
    """
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        if new in result:
            raise CheckpointError(
                f"{where}: {name!r} and another tensor are both the model's {new!r}"
            )
        result[new] = tensor
    return result


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


def taken(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """Remove a tensor and return it as contiguous float32.

    Raises:
        CheckpointError: missing, of another shape, not floating point, or sparse.
    """
    if name not in tensors:
        raise CheckpointError(f"{where}: missing key {name!r}")
    stored = tuple(tensors[name].shape)
    if stored != shape:
        raise CheckpointError(f"{where}: {name} has shape {list(stored)}, expected {list(shape)}")
    tensor = tensors.pop(name)
    if not tensor.is_floating_point() or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{where}: {name} is {tensor.dtype}, expected floating point, and dense"
        )
    return tensor.to(torch.float32).contiguous()


def shape_of(
    tensors: Mapping[str, Tensor], name: str, where: str, *dimensions: int
) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        CheckpointError: missing, empty, or of another number of dimensions.
    """
    if name not in tensors:
        raise CheckpointError(f"{where}: missing key {name!r}")
    shape = tuple(tensors[name].shape)
    if len(shape) not in dimensions or 0 in shape:
        wanted = " or ".join(map(str, dimensions))
        raise CheckpointError(
            f"{where}: {name} has shape {list(shape)}, expected {wanted} dimensions that are not "
            "empty"
        )
    return shape


def checked(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str
) -> dict[str, Tensor]:
    """Return tensors as float32 once their names and shapes are exactly these.

    Each shape is checked before any arithmetic, so memory stays bounded by the network's size.

    Raises:
        CheckpointError: one is missing, unexpected, of another shape or not floating point; it
            names the first.
    """
    differences = {
        "missing": shapes.keys() - tensors.keys(),
        "unexpected": tensors.keys() - shapes.keys(),
    }
    for kind, names in differences.items():
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(f"{where}: {kind} key {min(names)!r}{more}")
    left = dict(tensors)
    return {name: taken(left, name, shape, where) for name, shape in shapes.items()}
