"""Grafana's units, as far as the dashboard uses them."""

from __future__ import annotations

import math
from typing import Final

_SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "bytes": tuple((1024.0**power, f" {prefix}B") for power, prefix in enumerate(("", "Ki", "Mi", "Gi", "Ti"))),
    "none": ((1.0, ""),),
    "percentunit": ((0.01, " %"),),
    "reqps": ((1.0, " req/s"), (1e3, " K req/s")),
    "s": ((1e-6, " µs"), (1e-3, " ms"), (1.0, " s"), (60.0, " min"), (3600.0, " h")),
    "short": ((1.0, ""), (1e3, " K"), (1e6, " M")),
    "watt": ((1.0, " W"), (1e3, " kW")),
}
"""The steps of each unit: their size, and how values are written from that size on."""


def scale(unit: str, largest: float) -> tuple[float, str]:
    """Return the step of a unit that fits a value: what to divide by, and what to write behind."""
    fitting = [step for step in _SCALES[unit] if step[0] <= largest]
    return fitting[-1] if fitting else _SCALES[unit][0]


def text(value: float, unit: str) -> str:
    """Return a value with three digits and its unit."""
    if not math.isfinite(value):
        return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
    if value == 0:
        return "0" + next((suffix for size, suffix in _SCALES[unit] if size == 1), _SCALES[unit][0][1])
    size, suffix = scale(unit, abs(value))
    digits = max(0, 2 - math.floor(math.log10(abs(value / size))))
    written = f"{value / size:.{digits}f}"
    return (written.rstrip("0").rstrip(".") if "." in written else written) + suffix
