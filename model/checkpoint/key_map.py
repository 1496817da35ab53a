"""Maps of names that people write for their own state dicts."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def mapped(tensors: Mapping[str, Tensor], keys: str | None) -> dict[str, Tensor]:
    """Return the tensors under the names that a map gives them."""
    return dict(tensors)
