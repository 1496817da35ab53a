"""torchvision's five models (torchvision/models/vision_transformer.py), whose state dicts `home_made` recognises.

A state dict does not say how many heads it has; torchvision's models differ in width and patch. Released files are
known by name, which chooses their published preprocessing and labels.
"""

from __future__ import annotations

import re
from typing import Final

MODELS: Final = {
    (768, 16, 12, 3072): ("vit_b_16", 12),
    (768, 32, 12, 3072): ("vit_b_32", 12),
    (1024, 16, 24, 4096): ("vit_l_16", 16),
    (1024, 32, 24, 4096): ("vit_l_32", 16),
    (1280, 14, 32, 5120): ("vit_h_14", 16),
}
"""Name and heads of each, by width, edge of a patch, depth and width of the MLP."""

_RELEASED: Final = re.compile(r"(vit_[blh]_\d\d)(_lc_swag|_swag)?-[0-9a-f]{8}\.(?:pth|safetensors)")
_PRESETS: Final = {
    ("vit_b_16", None): "torchvision-224",
    ("vit_b_32", None): "torchvision-224",
    ("vit_l_16", None): "torchvision-l16-224",
    ("vit_l_32", None): "torchvision-224",
    ("vit_b_16", "_swag"): "torchvision-swag-384",
    ("vit_l_16", "_swag"): "torchvision-swag-512",
    ("vit_h_14", "_swag"): "torchvision-swag-518",
    ("vit_b_16", "_lc_swag"): "torchvision-swag-linear-224",
    ("vit_l_16", "_lc_swag"): "torchvision-swag-linear-224",
    ("vit_h_14", "_lc_swag"): "torchvision-swag-linear-224",
}
"""Preset of each released file, by the start of its name."""


def published_preset(file: str, name: str) -> str | None:
    """Return the preset of a released file of this model; None for other files."""
    match = _RELEASED.fullmatch(file)
    return _PRESETS.get((name, match[2])) if match is not None and match[1] == name else None
