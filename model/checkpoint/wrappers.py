"""Names of tensors without the parts that wrappers of modules add to them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

from torch import Tensor

from model.errors import CheckpointError

# Parts of names that torch puts around modules: compiled, checkpointed, sharded, and in parallel on
# several devices.
_WRAPPERS: Final = frozenset(
    {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
)
# Attributes in which people's own classes hold the network. No library's names begin with them.
_AROUND: Final = frozenset(
    {"model", "net", "network", "backbone", "encoder", "student", "ema_model", "base_model"}
)


def without_wrappers(
    tensors: Mapping[str, Tensor], where: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Remove the parts that wrappers add to names, and return a note of them with the tensors.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    result: dict[str, Tensor] = {}
    removed: dict[str, None] = {}  # a set that keeps its order
    for name, tensor in tensors.items():
        new, wrappers = _unwrapped(name)
        if new in result:
            raise CheckpointError(
                f"{where}: {name!r:.100} and another tensor are both {new!r:.100} without wrappers "
                "such as _orig_mod and module: save one copy of the network"
            )
        result[new] = tensor
        removed |= dict.fromkeys(wrappers)
    stripped = without_prefixes(result, _AROUND)
    prefix = next(iter(result), "").removesuffix(next(iter(stripped), ""))
    removed |= dict.fromkeys(prefix.split(".")[:-1])
    return stripped, prefix_notes(removed)


def without_prefixes(
    tensors: Mapping[str, Tensor], prefixes: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Remove the first parts that all names share, such as `_orig_mod.model.`.

    Args:
        tensors: tensors by name.
        prefixes: parts that may be removed; None allows any part.
    """
    stripped = dict(tensors)
    while stripped:
        firsts = {name.rpartition(".")[0].partition(".")[0] for name in stripped}
        [first, *others] = firsts
        if others or not first or (prefixes is not None and first not in prefixes):
            break
        stripped = {name.partition(".")[2]: tensor for name, tensor in stripped.items()}
    return stripped


def _unwrapped(name: str) -> tuple[str, list[str]]:
    """Return a name without the parts that wrappers added, and these parts."""
    *parts, last = name.split(".")
    kept = []
    wrappers = []
    is_in_block = False
    for part in parts:
        is_in_block = is_in_block or part.isdigit()
        # Within numbered blocks, `module` is the layers' own name (timm's iFormer).
        if part in _WRAPPERS or (part == "module" and not is_in_block):
            wrappers.append(part)
        else:
            kept.append(part)
    return ".".join([*kept, last]), wrappers


def left_out_notes(names: Sequence[str]) -> tuple[str, ...]:
    """Return a note of the tensors that were left out, if any were."""
    if not names:
        return ()
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (f"left out, because not part of the network: {', '.join(names[:5])}{more}",)


def prefix_notes(prefixes: Iterable[str]) -> tuple[str, ...]:
    """Return a note of the prefixes that were removed from names, if any were."""
    removed = ", ".join(f"{prefix}." for prefix in prefixes)
    return (f"removed from names of tensors: {removed}",) if removed else ()
