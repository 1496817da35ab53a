"""Maps of names, which people write for state dicts whose names are not recognised: applied, and drafted.

A map is a TOML file of entries. `from` and `to` are names in which `{}` stands for a block's number; several in `from`
are joined along the first dimension, several in `to` are equal parts of it; `transpose` turns a matrix. An empty `to`
leaves a tensor aside. Names that no entry mentions stay as they are.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from model.checkpoint.local_files import read_text_file
from model.checkpoint.refusals import reading, validating
from model.errors import CheckpointError

_OPEN: Final = "?"
"""What a draft has where it cannot tell."""
_IN_BLOCK: Final = (
    ("attn.qkv", r"qkv|in_proj"),
    ("mlp.fc1", r"fc1|(linear|dense|lin|w)_?1|\b(mlp|ffn?|net)\.0|intermediate|\bup\b"),
    ("mlp.fc2", r"fc2|(linear|dense|lin|w)_?2|\b(mlp|ffn?|net)\.[2-4]|\bdown\b"),
    ("norm1", r"(norm|ln)_?1|attn_?norm|attention_?norm|before|pre_?norm"),
    ("norm2", r"(norm|ln)_?2|(mlp|ffn?)_?norm|after|post_?norm"),
    ("attn.proj", r"(attn|attention)\.?(.*\.)?(out|proj|dense|o)|to_out"),
)
_OUTSIDE: Final = (
    ("cls_token", r"cls|class_?(token|emb)"),
    ("pos_embed", r"pos"),
    ("patch_embed.proj", r"patch|embed|conv"),
    ("head", r"head|classif|\bfc\b"),
    ("norm", r"norm|\bln"),
)
_HELP: Final = (
    "# Say in each entry which tensor of the model it is; then give this file with --keys. {} is a block's number:",
    "# blocks.{}.norm1, blocks.{}.attn.qkv, blocks.{}.attn.proj, blocks.{}.norm2, blocks.{}.mlp.fc1 and .fc2,",
    "# and outside the blocks patch_embed.proj, norm, head (of two layers: pre_logits.fc, head), each with .weight or",
    '# .bias, cls_token and pos_embed. from = ["a", "b"] joins rows, to = ["a", "b"] splits them, transpose = true',
    '# turns a matrix, and to = "" leaves a tensor aside.',
)


_Names = Annotated[
    tuple[Annotated[str, Field(max_length=1000)], ...],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    Field(min_length=1),
]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Annotated[_Names, Field(alias="from")]
    to: _Names
    transpose: bool = False


class _Map(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    tensor: Annotated[tuple[_Entry, ...], Field(min_length=1, max_length=10_000)]


def mapped(tensors: Mapping[str, Tensor], keys: str | None) -> dict[str, Tensor]:
    """Return the tensors under the names that a map gives them.

    Args:
        keys: path of the map; None leaves all names.

    Raises:
        CheckpointError: it cannot be read, is not finished, names what is not there, or one name twice.
    """
    if keys is None:
        return dict(tensors)
    path = Path(keys).expanduser()
    text = read_text_file(path, keys)
    with reading(keys, "not TOML", ValueError), validating(keys):
        entries = _Map.model_validate(tomllib.loads(text.decode())).tensor
    left, result = dict(tensors), dict[str, Tensor]()
    for entry in entries:
        if any(_OPEN in name for name in entry.to):
            raise CheckpointError(f"{keys}: {entry.source[0]!r}: say in place of {_OPEN!r} what it is")
        pattern = re.compile(re.escape(entry.source[0]).replace(r"\{\}", r"(\d+)"))
        matches = [match for name in list(left) if (match := pattern.fullmatch(name))]
        if not matches:
            raise CheckpointError(f"{keys}: {entry.source[0]!r}: no tensor of this name is left")
        for match in matches:
            parts = [_numbered(name, match) for name in entry.source]
            names = [_numbered(name, match) for name in entry.to]
            for name, tensor in _taken(entry, parts, names, left, keys):
                if name in result:
                    raise CheckpointError(f"{keys}: two tensors are called {name!r}")
                result[name] = tensor
    twice = left.keys() & result.keys()
    if twice:
        raise CheckpointError(f"{keys}: two tensors are called {min(twice)!r}")
    return left | result


def _numbered(name: str, match: re.Match[str]) -> str:
    for number in match.groups():
        name = name.replace("{}", number, 1)
    return name


def _taken(
    entry: _Entry, parts: list[str], names: list[str], left: dict[str, Tensor], keys: str
) -> list[tuple[str, Tensor]]:
    missing = [name for name in parts if name not in left]
    if missing:
        raise CheckpointError(f"{keys}: {missing[0]!r}: no tensor of this name is left")
    tensors = [left.pop(name) for name in parts]
    if names == [""]:
        return []
    if entry.transpose:
        if any(tensor.ndim != 2 for tensor in tensors):
            raise CheckpointError(f"{keys}: {parts[0]!r} is no matrix that could be transposed")
        tensors = [tensor.T for tensor in tensors]
    if len({tensor.shape[1:] for tensor in tensors}) != 1 or not tensors[0].ndim:
        raise CheckpointError(f"{keys}: {parts[0]!r} and {parts[-1]!r} cannot be joined: their shapes differ")
    joined = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    if len(names) == 1:
        return [(names[0], joined)]
    if joined.shape[0] % len(names):
        raise CheckpointError(f"{keys}: {parts[0]!r} has {joined.shape[0]} rows, which are not {len(names)} parts")
    return list(zip(names, joined.chunk(len(names)), strict=True))


def draft(tensors: Mapping[str, Tensor]) -> str:
    """Return a first draft of a map: every name once, blocks' numbers as `{}`, and the guesses that words allow."""
    kinds: dict[str, list[str]] = {}
    for name in tensors:
        kinds.setdefault(re.sub(r"\d+", "{}", name, count=1), []).append(name)
    lines = [*_HELP]
    apart: dict[str, dict[str, str]] = {}
    for kind, names in kinds.items():
        in_block = len(names) > 1 and len({tuple(tensors[name].shape) for name in names}) == 1
        sources = [(kind, tensors[names[0]])] if in_block else [(name, tensors[name]) for name in names]
        for source, tensor in sources:
            part = re.search(r"(?:^|[._])(?:to_)?(q|k|v)(?:uery|ey|alue)?(?:_\w+)?\.(weight|bias)$", source)
            if part is not None and in_block:
                apart.setdefault(part[2], {})[part[1]] = source
            else:
                lines += _written([source], _guess(source, tensor, in_block), tensor)
    for suffix, found in apart.items():
        complete = found.keys() == {"q", "k", "v"}
        target = f"blocks.{{}}.attn.qkv.{suffix}" if complete else _OPEN
        lines += _written([found[key] for key in "qkv" if key in found], target, None)
    return "\n".join(lines) + "\n"


def _guess(name: str, tensor: Tensor, in_block: bool) -> str:
    suffix = next((suffix for suffix in ("weight", "bias") if name.endswith(suffix)), "")
    for role, words in _IN_BLOCK if in_block else _OUTSIDE:
        if re.search(words, name.lower()):
            full = f"blocks.{{}}.{role}" if in_block else role
            return full if role in ("cls_token", "pos_embed") else f"{full}.{suffix}" if suffix else _OPEN
    return "patch_embed.proj.weight" if tensor.ndim == 4 and not in_block else _OPEN


def _written(sources: list[str], target: str, tensor: Tensor | None) -> list[str]:
    shape = "" if tensor is None else f"  # {list(tensor.shape)}"
    source = json.dumps(sources[0] if len(sources) == 1 else sources)
    return ["", "[[tensor]]", f"from = {source}{shape}", f"to = {json.dumps(target)}"]
