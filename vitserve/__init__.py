"""The package for programs that call the service: `from vitserve.client import Client`."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("vitserve")
except PackageNotFoundError:  # a copied working tree that is not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Import the clients on their first use, because httpx is slow to import."""
    if name in ("AsyncClient", "Client"):
        return getattr(import_module("vitserve.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
