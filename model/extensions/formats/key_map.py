"""Files of `VIT_KEYS`: new names for the tensors of a state dict with names of its own.

The file is TOML. `weights` is the key of the copy that is served, if the state dict holds several
copies of a network. Each `[[tensor]]` has `from` and `to`, names in which `{}` is the number of a
block. Several names in `from` are joined along the first dimension; `transpose` turns a matrix; an
empty `to` leaves a tensor out. Tensors without an entry keep their names.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from model.checkpoint.local_files import read_text_file, reading, validating
from model.errors import CheckpointError, nearest
from model.layer_config import Frozen


class _Entry(Frozen):
    source: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
        Field(alias="from", min_length=1),
    ]
    to: str
    transpose: bool = False


class KeyMap(Frozen):
    """The content of a file of `VIT_KEYS`.

    Attributes:
        weights: key of the copy of a network that is served.
        tensor: new names of tensors, in order.
    """

    weights: str | None = None
    tensor: tuple[_Entry, ...] = ()

    @property
    def renames_fused_projections(self) -> bool:
        """Whether an entry names queries, keys and values without saying how they are ordered."""
        return any(len(entry.source) == 1 and ".qkv." in entry.to for entry in self.tensor)


def read_key_map(path: str | None) -> KeyMap:
    """Return the content of a file of `VIT_KEYS`; an empty map for None.

    Raises:
        CheckpointError: it cannot be read, or is not such a file.
    """
    if path is None:
        return KeyMap()
    text = read_text_file(Path(path).expanduser(), path)
    with reading(path, "not TOML", ValueError), validating(path):
        return KeyMap.model_validate(tomllib.loads(text))


def mapped(tensors: Mapping[str, Tensor], keys: KeyMap) -> dict[str, Tensor]:
    """Return the tensors under the names that a map gives them.

    Raises:
        CheckpointError: an entry names a missing tensor, tensors cannot be joined, or two would
            have one name.
    """
    left = dict(tensors)
    result: dict[str, Tensor] = {}
    for entry in keys.tensor:
        for numbers in _block_numbers(left, entry.source[0]):
            name = _numbered(entry.to, numbers)
            tensor = _joined(left, entry, numbers)
            if name in result:
                raise CheckpointError(f"VIT_KEYS: two tensors are called {name!r}")
            if name:
                result[name] = tensor
    twice = left.keys() & result.keys()
    if twice:
        raise CheckpointError(f"VIT_KEYS: two tensors are called {min(twice)!r}")
    return left | result


def _block_numbers(tensors: Mapping[str, Tensor], source: str) -> list[tuple[str, ...]]:
    """Return the numbers that `{}` is in the names of tensors; one empty tuple if none matches."""
    pattern = re.compile(re.escape(source).replace(r"\{\}", r"(\d+)"))
    matches = (pattern.fullmatch(name) for name in tensors)
    return [match.groups() for match in matches if match] or [()]


def _joined(left: dict[str, Tensor], entry: _Entry, numbers: tuple[str, ...]) -> Tensor:
    """Take the tensors of an entry out of `left`, and join them."""
    parts = [_take(left, _numbered(name, numbers)) for name in entry.source]
    if entry.transpose:
        parts = [part.mT if part.ndim == 2 else part for part in parts]
    has_scalar = len(parts) > 1 and any(part.ndim == 0 for part in parts)
    if has_scalar or len({part.shape[1:] for part in parts}) > 1:
        raise CheckpointError(
            f"VIT_KEYS: {', '.join(entry.source)} cannot be joined: their shapes do not fit"
        )
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _numbered(name: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        name = name.replace("{}", number, 1)
    return name


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        near = nearest(name, tensors)
        advice = f"did you mean {near!r}?" if near else "{} stands for the number of a block"
        raise CheckpointError(f"VIT_KEYS: {name!r}: no tensor of this name is left: {advice}")
    return tensors.pop(name)
