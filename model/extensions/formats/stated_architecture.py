"""The architecture that the operator states with `VIT_ARCHITECTURE`.

It is a name of timm with optional arguments that differ, `vit_base_patch16_224,global_pool=avg`; or
`vit`, for a network whose tensors tell its sizes.
"""

import json
import re
from typing import Any, Final

from model.checkpoint.timm_architectures import architectures, runs_in_library, split_name
from model.checkpoint.timm_arguments import EvaArguments, TimmArguments
from model.errors import CheckpointError, nearest

OWN: Final = "vit"  # the architecture whose sizes the tensors tell

# Examples of the arguments that a message asks for. An absent part that is not here is false.
USUAL: Final = {
    "num_heads": "N",
    "norm_order": "pre",
    "act_layer": "gelu",
    "norm_eps": 1e-6,
    "qkv_order": "3hd",
    "global_pool": "token",
    "pos_embed": "none",
    "patch_order": "channels_last",
    "num_classes": 0,
}
# Arguments for the layout of the tensors, which are not timm's.
OF_LAYOUT: Final = frozenset({"qkv_order", "patch_order"})
_INFERRED: Final = frozenset({"img_size", "num_classes", "in_chans"})


def parse_architecture(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of `name[,argument=value]...`, with values as in JSON.

    Raises:
        CheckpointError: an unknown name, or arguments that cannot be read.
    """
    name, *pairs = re.split(
        r"\s*,\s*(?![^\[]*\])", text.strip()
    )  # a comma within a list does not split
    if "=" in name:
        raise CheckpointError(
            f"VIT_ARCHITECTURE {text!r:.200}: expected a name first, as in {OWN},{text[:200]}"
        )
    name, _ = split_name(name)
    known = _known_arguments(name)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise CheckpointError(f"VIT_ARCHITECTURE {pair!r}: expected argument=value")
        if known and key not in known:
            near = nearest(key, known)
            hint = f": did you mean {near}?" if near else ""
            raise CheckpointError(f"VIT_ARCHITECTURE: {name} has no argument {key!r:.100}{hint}")
        arguments[key] = _value(value)
        if key in _INFERRED and (key, arguments[key]) != ("num_classes", 0):
            raise CheckpointError(
                f"VIT_ARCHITECTURE {pair!r}: {key} is read from the file and need not be given"
            )
    return name, arguments


def is_eva(name: str) -> bool:
    """Return whether an architecture of timm is of the class `Eva`."""
    return architectures()[name].get("family") == "eva"


def _value(text: str) -> Any:
    """Return a value of JSON; a text that is not JSON stays as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _known_arguments(name: str) -> frozenset[str]:
    """Return the arguments that an architecture may have; empty if only timm's own code knows."""
    if name != OWN and runs_in_library(name, "VIT_ARCHITECTURE"):
        return frozenset()
    arguments = EvaArguments if name != OWN and is_eva(name) else TimmArguments
    return frozenset(arguments.model_fields) | OF_LAYOUT | USUAL.keys()
