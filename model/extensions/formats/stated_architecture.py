"""The architecture that the operator states with `VIT_ARCHITECTURE`.

It is a name of timm with optional arguments that differ, `vit_base_patch16_224,global_pool=avg`; or
`vit`, for a network whose tensors tell its sizes.
"""

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from model.checkpoint.timm_architectures import architectures, runs_in_library, split_name
from model.checkpoint.timm_arguments import EvaArguments, TimmArguments
from model.config import NetworkConfig
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
# Names that transformers and others give to arguments of timm.
_OTHER_NAMES: Final = {
    "depth": "num_hidden_layers num_layers n_layers layers num_blocks blocks",
    "embed_dim": "hidden_size hidden_dim width dim d_model",
    "num_heads": "num_attention_heads heads n_heads",
    "mlp_ratio": "intermediate_size mlp_dim mlp_width",
    "act_layer": "hidden_act activation act",
    "norm_eps": "layer_norm_eps eps",
    "num_classes": "num_labels classes",
    "img_size": "image_size size",
    "in_chans": "num_channels in_channels channels",
    "patch_size": "patch",
    "reg_tokens": "num_register_tokens registers",
}
# Arguments for the layout of the tensors, which are not timm's.
OF_LAYOUT: Final = frozenset({"qkv_order", "patch_order"})
# Arguments that the file and its preprocessing tell, and the fields of the network's configuration.
_TOLD: Final = {
    "img_size": "image_size",
    "num_classes": "num_classes",
    "in_chans": "in_channels",
}


def parse_architecture(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of `name[,argument=value]...`, with values as in JSON.

    Raises:
        CheckpointError: an unknown name, or arguments that cannot be read.
    """
    name, *pairs = re.split(
        r"\s*,\s*(?![^\[]*\])", text.strip()
    )  # a comma within a list does not split
    if "=" in name:
        example = f"{OWN},{text[:200]}"
        if re.match(r"\w+[^\w=]", name):
            example = re.sub(r"[^\w=.-]+", ",", text[:200])
        raise CheckpointError(
            f"VIT_ARCHITECTURE {text!r:.200}: expected a name first, then a comma, as in {example}"
        )
    name, _ = split_name(name)
    known = _known_arguments(name)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise CheckpointError(f"VIT_ARCHITECTURE {pair!r}: expected argument=value")
        if known and key not in known:
            raise CheckpointError(
                f"VIT_ARCHITECTURE: {name} has no argument {key!r:.100}: {_meant(key, known)}"
            )
        if key in arguments:
            raise CheckpointError(
                f"VIT_ARCHITECTURE: {key} is stated twice: {arguments[key]} and {value:.100}: "
                "remove the wrong one"
            )
        arguments[key] = _value(value)
    return name, arguments


def _meant(key: str, known: Collection[str]) -> str:
    """Return advice on the likely meaning of an unknown argument."""
    meant = next((name for name, others in _OTHER_NAMES.items() if key in others.split()), None)
    near = meant if meant in known else nearest(key, known)
    words = set(key.split("_"))
    common = {name: len(words.intersection(name.split("_"))) for name in known}
    most = max(common.values())
    similar = [near] if near else sorted(name for name in known if most and common[name] == most)
    return f"did you mean {' or '.join(similar)}?" if similar else f"it has {', '.join(USUAL)}"


def without_told(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that no file tells."""
    return {key: value for key, value in arguments.items() if key not in _TOLD}


def refuse_contradiction(config: NetworkConfig, arguments: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` for a stated argument that the file contradicts."""
    for key, field in _TOLD.items():
        told = getattr(config, field)
        if key == "img_size":
            told = list(told)
        stated = arguments.get(key, told)
        if key == "img_size" and isinstance(stated, int):
            stated = [stated, stated]
        if stated != told:
            raise CheckpointError(
                f"{where}: VIT_ARCHITECTURE says {key}={arguments[key]}, but the file and its "
                f"preprocessing tell {key}={told}: correct the argument, or leave it out"
            )


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
