"""The architectures of timm that vitserve's own network computes.

`timm_architectures.json` holds the arguments that each architecture's entry point passes to the
model class, so that a name alone tells the whole architecture. Models of other parts (parallel
blocks, differential attention) are not in the table; timm's own code runs them if it is installed.
"""

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from model.errors import CheckpointError
from model.network import library


@cache
def architectures() -> Mapping[str, dict[str, Any]]:
    """Return the arguments that each of timm's entry points passes to its model class, by name."""
    file = Path(__file__).parent / "timm_architectures.json"
    table: dict[str, dict[str, Any]] = json.loads(file.read_bytes())
    return table


def split_name(name: str) -> tuple[str, str]:
    """Return the architecture and the tag in a model's name: `timm/NAME.TAG`."""
    architecture, _, tag = re.sub(r"^(hf[-_]hub:)?timm/", "", name).partition(".")
    return architecture, tag


def runs_in_library(name: str, where: str) -> bool:
    """Return whether timm's own code, and not vitserve's network, computes an architecture.

    Args:
        name: timm's name of the architecture.
        where: name of the file or setting in messages.

    Raises:
        CheckpointError: the name is unknown, or timm is not installed.
    """
    if name in architectures():
        return False
    if library.knows(name):
        return True
    near = difflib.get_close_matches(name[:100], architectures(), n=3, cutoff=0.6)
    similar = f"; near it are {', '.join(near)}" if near else ", such as vit_base_patch16_224"
    others = f"; timm's own code runs others: {library.INSTALL}"
    if library.is_installed():
        others = ", and none of timm's others"
    raise CheckpointError(
        f"{where}: {name!r:.100} is none of the {len(architectures())} architectures of timm that "
        f"this version reads{similar}{others}"
    )
