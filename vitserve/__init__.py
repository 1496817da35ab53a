"""The package that programs import to call the service: `from vitserve.client import Client`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the installed `__version__`, which is looked up only when it is asked for."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415

        return version("vitserve")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
