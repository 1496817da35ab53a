"""The one state dict within what training code saved: chosen, never guessed, and freed of the prefixes around it.

A file may hold averaged (EMA) and raw weights, or a student and its teacher: which of them is served is the operator's
choice. Optimisers, schedulers and counters beside them are left aside, and said to be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Set
from typing import Any, Final

from torch import Tensor

from model.checkpoint.refusals import check_names
from model.errors import CheckpointError

_TRAINING: Final = re.compile(r"optim|sched|scaler|^amp$|callback|loops|hyper_?param|rng", re.IGNORECASE)
"""Keys of a training checkpoint whose tensors are no weights."""
_ASIDE: Final = re.compile(
    r"(step|decay|loss\w*|criterion\w*|\w*metrics?)(\..*)?|(.*\.)?(n_averaged|initted|num_updates|mask_token)"
)
"""Names of tensors in state dicts that have no part in classification."""
_WRAPPERS: Final = ("module", "_orig_mod", "state_dict", "model_state_dict")
"""Of DistributedDataParallel, torch.compile and training scripts, which wrap any model."""
_AVERAGED: Final = re.compile(r"ema|averag|shadow|swa|teacher|momentum|target", re.IGNORECASE)
_MAX_DEPTH: Final = 5
_MAX_CANDIDATES: Final = 32
_FEW: Final = 8
"""Names in common from which two parts are copies of one network; a block alone has twelve."""


def chosen_state_dict(value: Any, weights: str | None, where: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors of the network in what a file holds, and notes of what was left aside.

    Args:
        value: as unpickled, or tensors by name.
        weights: which copy, where there are several: `ema`, `raw`, `student`, `teacher`, or its key.
        where: what messages call the file.

    Raises:
        CheckpointError: no state dict, or several copies of one and none of them chosen.
    """
    candidates: dict[str, Mapping[str, Any]] = {}
    for path, found in _state_dicts(value, set()):
        if any(isinstance(tensor, Tensor) and tensor.ndim > 1 for tensor in found.values()):
            check_names(found, where)
            candidates[path] = found
        if len(candidates) > _MAX_CANDIDATES:
            raise CheckpointError(f"{where}: holds more than {_MAX_CANDIDATES} state dicts: save the one to be served")
    if not candidates:
        keys = f" with the keys {', '.join(map(repr, list(value)[:5]))}" if isinstance(value, Mapping) and value else ""
        raise CheckpointError(
            f"{where}: holds a {type(value).__name__}{keys}, expected a state dict of tensors, as "
            "torch.save(model.state_dict(), FILE) writes it"
        )
    parts = _one_of(candidates, weights, where)
    tensors: dict[str, Tensor] = {}
    aside = [key for key in value if not any(f"{path}.".startswith((".", f"{key}.")) for path in candidates)]
    for path, found in parts.items():
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor) or _ASIDE.fullmatch(name):
                aside.append(name)
            else:
                tensors[f"{path}.{name}" if path else name] = tensor
    check_names(tensors, where)
    stored = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors.values()}
    # Each would take memory of its own.
    if sum(tensor.nbytes for tensor in tensors.values()) > 2 * sum(stored.values()):
        raise CheckpointError(f"{where}: its tensors are parts of each other, and more than twice what the file holds")
    if weights is not None and len(parts) == len(candidates):
        _check_role(tensors, weights, where)
    shown = ", ".join(map(str, aside[:5])) + (f" and {len(aside) - 5} more" if len(aside) > 5 else "")
    return without_prefixes(tensors, _WRAPPERS), ((f"left aside, as no part of the network: {shown}",) if aside else ())


def unwrapped(tensors: Mapping[str, Tensor], weights: str | None, where: str) -> dict[str, Tensor]:
    """Return the tensors of one network, without the names of what it was a part of.

    Raises:
        CheckpointError: several copies of a network, and none of them chosen.
    """
    tensors = without_prefixes(tensors)
    copies = _copies(tensors)
    if copies:
        tensors = without_prefixes(*_one_of(copies, weights, where).values())
    return _headed(tensors)


def without_prefixes(tensors: Mapping[str, Tensor], known: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return tensors without the first parts, all or the `known`, that all their names share: `_orig_mod.model.`."""
    stripped = dict(tensors)
    while stripped:
        firsts = {name.partition(".")[0] if "." in name else "" for name in stripped}
        if len(firsts) > 1 or "" in firsts or (known is not None and not firsts <= set(known)):
            break
        stripped = {name.partition(".")[2]: tensor for name, tensor in stripped.items()}
    return stripped


def _state_dicts(value: Any, seen: set[int], path: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the mappings from names to tensors in a value once each, with the keys that lead to them."""
    if not isinstance(value, Mapping) or id(value) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    if not all(isinstance(key, str) for key in value):
        return
    here = {key: inner for key, inner in value.items() if not isinstance(inner, Mapping)}
    if any(isinstance(inner, Tensor) for inner in here.values()):
        yield path, here
    for key, inner in value.items():
        if not _TRAINING.search(key):
            yield from _state_dicts(inner, seen, f"{path}.{key}" if path else key, depth + 1)


def _one_of(parts: Mapping[str, Mapping[str, Any]], weights: str | None, where: str) -> Mapping[str, Mapping[str, Any]]:
    """Return the parts of one network: all of them, or the chosen one where some are copies of each other."""
    paths = list(parts)
    names = [without_prefixes(part).keys() for part in parts.values()]
    if not any(_alike(a, b) for i, a in enumerate(names) for b in names[:i]):
        return parts
    chosen = [path for path in paths if weights in (path, _role(path))]
    if len(chosen) == 1:
        return {"": parts[chosen[0]]}
    roles = [_role(path) for path in paths]
    choices = [role if roles.count(role) == 1 else path for role, path in zip(roles, paths, strict=True)]
    raise CheckpointError(
        f"{where}: holds {len(paths)} copies of a network, {' and '.join(paths)}: choose one with "
        f"{' or '.join(f'--weights {choice}' for choice in choices)} (VIT_WEIGHTS)"
    )


def _check_role(tensors: Mapping[str, Tensor], weights: str, where: str) -> None:
    """Refuse the only copy of a network that a file has where another one is asked for."""
    stripped = without_prefixes(tensors)
    prefix = next(iter(tensors)).removesuffix(next(iter(stripped))).rstrip(".")
    if not _copies(stripped) and weights != _role(prefix) and f".{weights}." not in f".{prefix}.":
        called = f", {prefix}" if prefix else ""
        raise CheckpointError(
            f"{where}: holds one copy of a network{called}, and none that is called {weights!r:.100}: it is read "
            "without --weights (VIT_WEIGHTS)"
        )


def _role(path: str) -> str:
    if re.search("student|teacher", path):
        return "student" if "student" in path else "teacher"
    return "ema" if _AVERAGED.search(path) else "raw"


def _alike(left: Set[str], right: Set[str]) -> bool:
    """Return whether two parts have most of their names in common, which have no prefixes."""
    return len(left & right) >= max(min(len(left), len(right)) / 2, min(_FEW, len(left), len(right)))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the parts of a state dict, by their first name, that are copies of each other; mostly there are none."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.partition(".")
        parts.setdefault(first, {})[rest] = tensor
    large = {first: part for first, part in parts.items() if len(part) >= _FEW}
    # Blocks are alike, too, but differ in their number.
    kinds = {re.sub(r"\d+", "", first) for first in large}
    if len(kinds) < 2 or len(kinds) < len(large) or len(large) > _MAX_CANDIDATES:
        return {}
    names = {first: without_prefixes(part).keys() for first, part in large.items()}
    return {a: part for a, part in large.items() if any(a != b and _alike(names[a], names[b]) for b in names)}


def _headed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a backbone's tensors without their prefix, where all that has another name can be its head."""
    parts: dict[str, list[str]] = {}
    for name in tensors:
        parts.setdefault(name.partition(".")[0], []).append(name)
    largest = max(parts.values(), key=len, default=[])
    others = tensors.keys() - largest
    inner = without_prefixes({name: tensors[name] for name in largest})
    is_head = 0 < len(others) <= _FEW and all("." in name and tensors[name].ndim <= 2 for name in others)
    has_patches = any(tensor.ndim == 4 or "patch" in name for name, tensor in inner.items())
    if not is_head or not has_patches or len(largest) < _FEW or inner.keys() & others:
        return tensors
    return inner | {name: tensors[name] for name in others}
