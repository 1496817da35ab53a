"""The one state dict within what training code saved, freed of the prefixes around it.

Optimisers, schedulers and counters beside the network are left aside, and said to be. Of several
copies of a network the averaged one is served, as is usual: an EMA, or a teacher; where that is not
one, the operator names it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from torch import Tensor

from model.errors import CheckpointError

# Keys of a training checkpoint whose tensors are no weights.
_TRAINING: Final = re.compile(
    r"optim|sched|scaler|^amp$|callback|loops|hyper_?param|rng", re.IGNORECASE
)
# Names of tensors in state dicts that have no part in classification.
_ASIDE: Final = re.compile(
    r"(.*\.)?((step|decay|loss\w*|criterion\w*|\w*metrics?)(\..*)?|n_averaged|initted|num_updates|mask_token)"
)
_AVERAGED: Final = re.compile(r"ema|averag|shadow|swa|teacher|momentum|target", re.IGNORECASE)
_MAX_DEPTH: Final = 5
# Parts of names that torch puts around modules: compiled, checkpointed, sharded, and in parallel on
# several devices.
_WRAPPERS: Final = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
)
# Parts before all names that people's own classes put around a network; no library's network begins
# with them.
_AROUND: Final = frozenset(
    {"model", "net", "network", "backbone", "encoder", "student", "ema_model", "base_model"}
)
# Names in common from which two parts are copies of one network; a block alone has twelve.
_FEW: Final = 8

Tensors = dict[str, Tensor]


class Chosen(NamedTuple):
    """The network within what a file holds.

    Attributes:
        tensors: of the network alone, by its own names.
        notes: what was left aside.
        assumed: which copy was chosen of several.
    """

    tensors: Tensors
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def chosen_state_dict(value: Any, copy: str | None, where: str) -> Chosen:
    """Return the tensors of the network in what a file holds.

    Args:
        value: as unpickled, or tensors by name.
        copy: key or prefix of the one that is meant, where there are several.
        where: what messages call the file.

    Raises:
        CheckpointError: no state dict, or several copies of one and none of them chosen.
    """
    held = dict(_flat(value))
    tensors = {
        name: item
        for name, item in held.items()
        if isinstance(item, Tensor) and not _ASIDE.fullmatch(name)
    }
    if not any(tensor.ndim > 1 for tensor in tensors.values()):
        keys = (
            f" with the keys {', '.join(map(repr, list(value)[:5]))}"
            if isinstance(value, Mapping) and value
            else ""
        )
        raise CheckpointError(
            f"{where}: holds a {type(value).__name__}{keys}, expected a state dict of tensors, as "
            "torch.save(model.state_dict(), FILE) writes it"
        )
    roots = {name.partition(".")[0] for name, tensor in tensors.items() if tensor.ndim > 1}
    # A number beside the state dict, such as the best accuracy, is no part of it.
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.ndim or name.partition(".")[0] in roots
    }
    notes = aside_notes([name for name in held if name not in tensors])
    if copy is not None:
        marker = f".{copy}."
        meant = {
            f".{name}".partition(marker)[2]: t
            for name, t in tensors.items()
            if marker in f".{name}"
        }
        if not meant:
            raise CheckpointError(
                f"{where}: holds no copy of a network that is called {copy!r:.100}"
            )
        return _bare(meant, notes)
    copies = _copies(without_prefixes(tensors))
    if not copies:
        return _bare(tensors, notes)
    averaged = [name for name in copies if _AVERAGED.search(name)]
    others = [name for name in copies if name not in averaged]
    if len(averaged) != 1:
        raise CheckpointError(
            f"{where}: holds {len(copies)} copies of a network, {' and '.join(copies)}: name one in the file of "
            f'VIT_KEYS: weights = "{others[0] if others else averaged[0]}"'
        )
    assumed = f'weights: {averaged[0]}, and not {" or ".join(others)} (weights = "{others[0]}" in the file of VIT_KEYS)'
    return _bare(copies[averaged[0]], notes, (assumed,))


def aside_notes(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note of the tensors that were left aside, if there are any."""
    if not names:
        return ()
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (f"left aside, as no part of the network: {', '.join(map(str, names[:5]))}{more}",)


def prefix_notes(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return a note of what was removed from names, if anything was."""
    removed = ", ".join(f"{prefix}." for prefix in prefixes)
    return (f"removed from names of tensors: {removed}",) if removed else ()


def _bare(tensors: Tensors, notes: tuple[str, ...], assumed: tuple[str, ...] = ()) -> Chosen:
    """Return a network without the prefixes of all its names, and of its backbone's, which are
    noted.
    """
    result = _headed(without_prefixes(tensors))
    names = {id(tensor): name for name, tensor in result.items()}
    pairs = [(name, f".{names[id(tensor)]}") for name, tensor in tensors.items()]
    removed = dict.fromkeys(old.removesuffix(new) for old, new in pairs if old.endswith(new))
    return Chosen(result, notes + prefix_notes(removed), assumed)


def without_wrappers(tensors: Mapping[str, Tensor], where: str) -> tuple[Tensors, tuple[str, ...]]:
    """Return tensors without the parts of their names that wrappers of modules add, and a note of
    what was removed.

    Raises:
        CheckpointError: two tensors would have one name.
    """
    result = Tensors()
    removed: dict[str, None] = {}
    for name, tensor in tensors.items():
        *parts, last = name.split(".")
        first_number = next(
            (place for place, part in enumerate(parts) if part.isdigit()), len(parts)
        )
        # Within numbered blocks, `module` is the layers' own name (timm's iFormer).
        kept = [
            part
            for place, part in enumerate(parts)
            if part not in _WRAPPERS and (part != "module" or place > first_number)
        ]
        new = ".".join([*kept, last])
        if new in result:
            raise CheckpointError(
                f"{where}: {name!r:.100} and another tensor are both {new!r:.100} without wrappers such as "
                "_orig_mod and module: save one copy of the network"
            )
        result[new] = tensor
        removed |= dict.fromkeys(part for part in parts if part not in kept)
    while len(firsts := {name.partition(".")[0] for name in result}) == 1 and firsts <= _AROUND:
        removed |= dict.fromkeys(firsts)
        result = {name.partition(".")[2]: tensor for name, tensor in result.items()}
    return result, prefix_notes(removed)


def without_prefixes(tensors: Mapping[str, Tensor]) -> Tensors:
    """Return tensors without the first parts that all their names share: `_orig_mod.model.`."""
    stripped = dict(tensors)
    while stripped:
        firsts = {name.partition(".")[0] if "." in name else "" for name in stripped}
        if len(firsts) > 1 or "" in firsts:
            break
        stripped = {name.partition(".")[2]: tensor for name, tensor in stripped.items()}
    return stripped


def _flat(value: Any, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield what is in nested mappings with the keys that lead to it; None in the place of what
    belongs to training.
    """
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        name = f"{prefix}{key}"
        if not isinstance(inner, Mapping):
            yield name, inner
        elif (
            _TRAINING.search(str(key))
            or depth == _MAX_DEPTH
            or not all(isinstance(each, str) for each in inner)
        ):
            yield name, None
        else:
            yield from _flat(inner, f"{name}.", depth + 1)


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    parts: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = tensor
    return parts


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Return the parts of a state dict, by their first name, that are copies of each other; mostly
    there are none.
    """
    large = {first: part for first, part in _parts(tensors).items() if len(part) >= _FEW}
    names = {first: without_prefixes(part).keys() for first, part in large.items()}

    def alike(a: str, b: str) -> bool:
        # Blocks are alike, too, but differ in their number.
        is_block = re.sub(r"\d+", "", a) == re.sub(r"\d+", "", b)
        return not is_block and 2 * len(names[a] & names[b]) >= min(len(names[a]), len(names[b]))

    return {a: part for a, part in large.items() if any(alike(a, b) for b in large)}


def _headed(tensors: Tensors) -> Tensors:
    """Return a backbone's tensors without their prefix, where all that has another name can be its
    head.
    """
    parts = _parts(tensors)
    largest = max(parts, key=lambda first: len(parts[first]))
    inner = without_prefixes(parts.pop(largest))
    others = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in parts}
    is_head = 0 < len(others) <= _FEW and all(
        "." in name and tensor.ndim <= 2 for name, tensor in others.items()
    )
    has_patches = any(tensor.ndim == 4 or "patch" in name for name, tensor in inner.items())
    return inner | others if is_head and has_patches and not inner.keys() & others else tensors
