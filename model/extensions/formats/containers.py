"""The one network within the content of a file that training code saved.

Optimisers, schedulers and counters are left out, with a note. If the file holds several copies of a
network, the averaged copy is served, as is usual: an EMA, or a teacher. If not exactly one copy is
averaged, the operator names the copy.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from model.checkpoint.own_heads import HEAD
from model.checkpoint.tensors import SCALES
from model.checkpoint.unread_tensors import refuse_quantised
from model.checkpoint.wrappers import left_out_notes, prefix_notes, without_prefixes
from model.errors import CheckpointError

# Keys of a training checkpoint whose tensors are not weights.
_TRAINING: Final = re.compile(
    r"optim|sched|scaler|^amp$|callback|loops|hyper_?param|rng", re.IGNORECASE
)
# Names of tensors in state dicts that classification does not use.
_UNUSED: Final = re.compile(
    r"(.*\.)?((step|decay|loss\w*|criterion\w*|class_weights?|pos_weight|\w*metrics?|(train|val|valid|test)_\w+)(\..*)?|"
    r"n_averaged|initted|num_updates|mask_token|decoder_(embed|pos_embed|blocks|norm|pred)(\..*)?)"
)
_AVERAGED: Final = re.compile(r"ema|averag|shadow|swa|teacher|momentum|target", re.IGNORECASE)
# Averaged weights in parts of training, such as a callback, or in a list without names.
_UNREAD_AVERAGES: Final = re.compile(r"(^|[._])(ema|shadow|swa|averag)", re.IGNORECASE)
_MAX_DEPTH: Final = 5
# Two parts with this many names in common are copies of one network; a block alone has twelve.
_MIN_COMMON_NAMES: Final = 8
# A head of four layers has this many tensors; a block alone has more.
_MAX_HEAD_TENSORS: Final = 8
# Names of linear layers that do not look like parts of a backbone.
_LAYER: Final = re.compile(
    r"(?!.*(conv|norm|bn\d|embed|block|attn|qkv|kqv|token))(.+\.)?(weight|bias)"
)

Tensors = dict[str, Tensor]


class Network(NamedTuple):
    """The network within the content of a file.

    Attributes:
        tensors: tensors of the network alone, by its own names.
        notes: names that were left out.
        assumed: the copy that was chosen of several.
    """

    tensors: Tensors
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def network_in(content: Any, copy: str | None, where: str) -> Network:
    """Return the network within the content of a file.

    Args:
        content: unpickled object, or tensors by name.
        copy: key or prefix of the copy to choose, if there are several.
        where: name of the file in messages.

    Raises:
        CheckpointError: not a state dict, quantised, or several copies of a network and no choice.
    """
    items = dict(_flat(content))
    refuse_quantised(items, where)
    tensors = _weights(items, content, where)
    left_out = [str(name) for name in items if name not in tensors]
    notes = left_out_notes(left_out)
    unnamed = tuple(
        f"weights: the raw ones, because {name} holds averaged ones in a form that is not read"
        for name in left_out
        if isinstance(items[name], list | Mapping) and _UNREAD_AVERAGES.search(name)
    )
    if copy is not None:
        return _without_prefix(_copy_of(tensors, copy, where), notes)
    copies = _copies(without_prefixes(tensors))
    if not copies:
        return _without_prefix(tensors, notes, unnamed)
    averaged = [name for name in copies if _AVERAGED.search(name)]
    others = [name for name in copies if name not in averaged]
    if len(averaged) != 1:
        example = others[0] if others else averaged[0]
        raise CheckpointError(
            f"{where}: holds {len(copies)} copies of a network, {' and '.join(copies)}: name one "
            f'in the file of VIT_KEYS: weights = "{example}"'
        )
    assumed = (
        f"weights: {averaged[0]}, and not {' or '.join(others)} "
        f'(weights = "{others[0]}" in the file of VIT_KEYS)'
    )
    _refuse_head_beside(tensors, copies, where)
    return _without_prefix(copies[averaged[0]], notes, (assumed,))


def _refuse_head_beside(
    tensors: Mapping[str, Tensor], copies: Mapping[str, Tensors], where: str
) -> None:
    """Refuse a head in a file with copies of a backbone, of which it reads only one."""
    weights = (
        f"{name!r:.100} {list(tensor.shape)}"
        for name, tensor in without_prefixes(tensors).items()
        if name.partition(".")[0] not in copies and tensor.ndim == 2 and HEAD.fullmatch(name)
    )
    heads = list(weights)
    if heads:
        raise CheckpointError(
            f"{where}: holds the backbones {' and '.join(copies)}, and beside them {heads[0]}, "
            "likely a head of one of them: where it was made, save the right two alone, "
            "torch.save({name: tensor for name, tensor in state_dict.items() if "
            "name.startswith((BACKBONE, HEAD))}, FILE)"
        )


def refuse_lone_head(tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise `CheckpointError` for a head without the backbone whose features it reads."""
    if 0 < len(tensors) <= _MAX_HEAD_TENSORS and all(
        tensor.ndim <= 2 and _LAYER.fullmatch(name) for name, tensor in tensors.items()
    ):
        shown = ", ".join(f"{name!r:.100} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise CheckpointError(
            f"{where}: a head alone, {shown}, without the backbone whose features it reads: save "
            "both in one file, torch.save(model.state_dict(), FILE) of the whole model"
        )


def _weights(items: Mapping[str, Any], content: Any, where: str) -> Tensors:
    """Return the tensors that are weights; raise `CheckpointError` without any."""
    tensors = {
        name: item
        for name, item in items.items()
        if isinstance(item, Tensor) and not _UNUSED.fullmatch(name)
    }
    roots = {name.partition(".")[0] for name, tensor in tensors.items() if tensor.ndim > 1}
    if not roots:
        keys = ""
        if isinstance(content, Mapping) and content:
            keys = f" with the keys {', '.join(map(repr, list(content)[:5]))}"
            if "ds_version" in content:
                keys += ", a part of DeepSpeed's: run python zero_to_fp32.py . OUT in its folder"
        raise CheckpointError(
            f"{where}: holds a {type(content).__name__}{keys}, expected a state dict of tensors, "
            "as torch.save(model.state_dict(), FILE) writes it"
        )
    # A number next to the state dict, such as the best accuracy, is not a weight.
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.ndim or name.partition(".")[0] in roots or SCALES.fullmatch(name)
    }


def _copy_of(tensors: Tensors, copy: str, where: str) -> Tensors:
    """Return the tensors of the copy that the operator names."""
    marker = f".{copy}."
    chosen = {
        f".{name}".partition(marker)[2]: tensor
        for name, tensor in tensors.items()
        if marker in f".{name}"
    }
    if not chosen:
        raise CheckpointError(f"{where}: holds no copy of a network that is called {copy!r:.100}")
    return chosen


def _without_prefix(
    tensors: Tensors, notes: tuple[str, ...], assumed: tuple[str, ...] = ()
) -> Network:
    """Return the network without the prefixes of all its names and of its backbone's names."""
    result = _with_head(without_prefixes(tensors))
    new_names = {id(tensor): f".{name}" for name, tensor in result.items()}
    removed: dict[str, None] = {}  # a set that keeps its order
    for name, tensor in tensors.items():
        new_name = new_names[id(tensor)]
        if name.endswith(new_name):
            removed[name.removesuffix(new_name)] = None
    return Network(result, notes + prefix_notes(removed), assumed)


def _flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the items of nested mappings by their joined keys; parts of training stay whole."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        name = f"{prefix}{key}"
        is_part = isinstance(inner, Mapping) and all(isinstance(part, str) for part in inner)
        if is_part and depth < _MAX_DEPTH and not _TRAINING.search(str(key)):
            yield from _flat(inner, f"{name}.", depth + 1)
        else:
            yield f"{name}{_average_in(inner)}", inner


def _average_in(value: Any) -> str:
    """Return `.KEY` for a key of averaged weights in a part of training; empty without one."""
    parts = value if isinstance(value, list) else [value]
    keys = (str(key) for part in parts if isinstance(part, Mapping) for key in part)
    return next((f".{key}" for key in keys if _UNREAD_AVERAGES.search(key)), "")


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Return tensors by the first part of their names, then by the rest."""
    parts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = tensor
    return parts


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Return the parts of a state dict, by their first name, that are copies of each other."""
    large = {
        first: part for first, part in _parts(tensors).items() if len(part) >= _MIN_COMMON_NAMES
    }
    names = {first: without_prefixes(part).keys() for first, part in large.items()}

    def are_copies(a: str, b: str) -> bool:
        # Blocks have the same names, too, but differ in their number.
        is_block = re.sub(r"\d+", "", a) == re.sub(r"\d+", "", b)
        return not is_block and 2 * len(names[a] & names[b]) >= min(len(names[a]), len(names[b]))

    return {a: part for a, part in large.items() if any(are_copies(a, b) for b in large)}


def _with_head(tensors: Tensors) -> Tensors:
    """Remove the prefix of a backbone if all other tensors can be its head."""
    parts = _parts(tensors)
    largest = max(parts, key=lambda first: len(parts[first]))
    backbone = without_prefixes(parts.pop(largest))
    others = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in parts}
    is_head = 0 < len(others) <= _MAX_HEAD_TENSORS and all(
        "." in name and tensor.ndim <= 2 for name, tensor in others.items()
    )
    has_patches = any(tensor.ndim == 4 or "patch" in name for name, tensor in backbone.items())
    if not is_head or not has_patches or backbone.keys() & others:
        return tensors
    return backbone | others
