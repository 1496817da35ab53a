"""The package that programs import to call the service: `from vitserve.client import Client`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Return the installed `__version__`, which is looked up only when it is asked for.

    It is `0+unknown` in a working tree that was copied and not installed.
    """
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

        try:
            return version("vitserve")
        except PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
