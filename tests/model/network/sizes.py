"""Architectures of known size."""

from __future__ import annotations

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "mlp_width": 768},
    "small": {"width": 384, "depth": 12, "heads": 6, "mlp_width": 1536},
    "base": {"width": 768, "depth": 12, "heads": 12, "mlp_width": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "mlp_width": 4096},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "mlp_width": 5120},
}
"""The paper's variants (Dosovitskiy et al. 2020, table 1), and Tiny and Small (Touvron et al. 2020)."""
