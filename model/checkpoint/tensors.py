"""Renaming of a file's tensors to the model's names, each checked before it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from model.checkpoint.refusals import first_and_count
from model.config import ViTConfig
from model.errors import CheckpointError
from model.network.vit import checkpoint_shapes

Names = Mapping[str, str | tuple[str | None, ...]]
"""A file's name of each of the model's modules, without `.weight` and `.bias`, or of a single parameter.

`{}` stands for a block's number on both sides. Several names are parts that the model has fused along the
first dimension; a part that is None has no tensor and counts as zero.
"""

_BLOCK: Final = re.compile(r"^blocks\.(\d+)\.")


class TensorSource:
    """Tensors under their file's own names, each to be taken once and by its expected shape.

    What a reader leaves is unexpected, unless its family lists it as unused. No arithmetic happens
    before a shape has been checked, so a hostile file cannot make a reader allocate.

    Args:
        tensors: as stored.
        where: what messages call the file.
        unused: whether (truthy) a name is known and not needed.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], where: str, unused: Callable[[str], object] = lambda name: False
    ) -> None:
        self.where = where
        self._left = {name: tensor for name, tensor in tensors.items() if not unused(name)}

    def __contains__(self, name: str) -> bool:
        return name in self._left

    @property
    def names(self) -> Iterable[str]:
        """Return the names that were not taken yet."""
        return self._left.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            CheckpointError: there is none of this name.
        """
        if name not in self._left:
            raise CheckpointError(f"{self.where}: missing key {name!r}")
        return tuple(self._left[name].shape)

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor as float32 and remove it from what is left.

        Raises:
            CheckpointError: missing, of another shape, or not floating point.
        """
        stored = self.shape(name)
        if stored != shape:
            raise CheckpointError(f"{self.where}: {name} has shape {list(stored)}, expected {list(shape)}")
        return as_float32(self._left.pop(name), name, self.where)

    def finish(self) -> None:
        """Refuse tensors that nobody took.

        Raises:
            CheckpointError: names the first tensor that is left.
        """
        if self._left:
            raise CheckpointError(f"{self.where}: unexpected key {first_and_count(sorted(self._left))}")


def take_model(
    stored: TensorSource, config: ViTConfig, names: Names, taken: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Take every tensor of an architecture from a file that has the same layout under other names.

    They are float32, named and shaped as the model's; those in `taken`, by the model's names, are not looked for.

    Raises:
        CheckpointError: as `TensorSource.take`.
    """
    return take_all(stored, checkpoint_shapes(config), names, taken)


def take_all(
    stored: TensorSource, shapes: Mapping[str, tuple[int, ...]], names: Names, taken: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Take every tensor of a network that has these names and shapes; see `take_model`."""
    tensors = dict(taken or {})
    for name, (rows, *rest) in shapes.items():
        if name not in tensors:
            parts = _parts(name, names)
            shape = rows // len(parts), *rest
            read = [torch.zeros(shape) if part is None else stored.take(part, *shape) for part in parts]
            tensors[name] = torch.cat(read) if len(read) > 1 else read[0]
    return tensors


def _parts(name: str, names: Names) -> list[str | None]:
    block = _BLOCK.match(name)
    number = block[1] if block else ""
    key, suffix = _BLOCK.sub("blocks.{}.", name), ""
    if key not in names:
        key, _, kind = key.rpartition(".")
        suffix = f".{kind}"
    parts = names[key]
    return [part and part.format(number) + suffix for part in ((parts,) if isinstance(parts, str) else parts)]


def renamed(tensors: Mapping[str, Tensor], rules: Sequence[tuple[str, str]]) -> dict[str, Tensor]:
    """Return tensors under new names: each rule is a pattern and its replacement, applied in order."""
    result = {}
    for name, tensor in tensors.items():
        new = name
        for pattern, replacement in rules:
            new = re.sub(pattern, replacement, new)
        result[new] = tensor
    return result


def fuse_pairs(tensors: dict[str, Tensor], first: str, second: str, fused: str) -> None:
    """Concatenate, in place, pairs of equal shape whose names differ in `first` and `second` alone."""
    for name in [name for name in tensors if first in name]:
        other = name.replace(first, second)
        if other in tensors and tensors[other].shape == tensors[name].shape:
            tensors[name.replace(first, fused)] = torch.cat((tensors.pop(name), tensors.pop(other)))


def as_float32(tensor: Tensor, name: str, where: str) -> Tensor:
    """Return a floating-point tensor as contiguous float32.

    Raises:
        CheckpointError: integers or complex numbers.
    """
    if not tensor.is_floating_point():
        raise CheckpointError(f"{where}: {name} is {tensor.dtype}, expected floating point")
    return tensor.to(torch.float32).contiguous()
