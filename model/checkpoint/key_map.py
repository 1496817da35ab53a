"""Files of `VIT_KEYS`, which people write for state dicts with names of their own: new names, and
which copy is meant.

A TOML file. `weights` is the key of the copy of a network that is served, of files with several.
Each `[[tensor]]` has `from` and `to`, names in which `{}` stands for a block's number. Several in
`from` are joined along the first dimension; `transpose` turns a matrix; an empty `to` leaves a
tensor aside. Other names stay as they are.
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
from model.errors import CheckpointError
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
    """What a file of `VIT_KEYS` says.

    Attributes:
        weights: key of the copy of a network that is served.
        tensor: new names of tensors, in order.
    """

    weights: str | None = None
    tensor: tuple[_Entry, ...] = ()


def read_key_map(keys: str | None) -> KeyMap:
    """Return the content of the file `keys`; an empty map for None.

    Raises:
        CheckpointError: it cannot be read, or is not such a file.
    """
    if keys is None:
        return KeyMap()
    text = read_text_file(Path(keys).expanduser(), keys)
    with reading(keys, "not TOML", ValueError), validating(keys):
        return KeyMap.model_validate(tomllib.loads(text))


def mapped(tensors: Mapping[str, Tensor], keys: KeyMap) -> dict[str, Tensor]:
    """Return the tensors under the names that a map gives them.

    Raises:
        CheckpointError: it names what is not there or cannot be joined, or one name twice.
    """
    left, result = dict(tensors), dict[str, Tensor]()
    for entry in keys.tensor:
        pattern = re.compile(re.escape(entry.source[0]).replace(r"\{\}", r"(\d+)"))
        numbers = [match.groups() for name in list(left) if (match := pattern.fullmatch(name))]
        for each in numbers or [()]:
            parts = [_take(left, _numbered(name, each)) for name in entry.source]
            name = _numbered(entry.to, each)
            if name in result:
                raise CheckpointError(f"VIT_KEYS: two tensors are called {name!r}")
            if entry.transpose:
                parts = [part.mT if part.ndim == 2 else part for part in parts]
            if len({part.shape[1:] for part in parts}) > 1:
                raise CheckpointError(
                    f"VIT_KEYS: {', '.join(entry.source)} cannot be joined: their shapes differ"
                )
            if name:
                result[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    twice = left.keys() & result.keys()
    if twice:
        raise CheckpointError(f"VIT_KEYS: two tensors are called {min(twice)!r}")
    return left | result


def _numbered(name: str, numbers: tuple[str, ...]) -> str:
    for number in numbers:
        name = name.replace("{}", number, 1)
    return name


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"VIT_KEYS: {name!r}: no tensor of this name is left")
    return tensors.pop(name)
