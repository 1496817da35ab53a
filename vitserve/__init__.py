"""The package for programs that call the service: `from vitserve.client import Client`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vitserve")
except PackageNotFoundError:  # a copied working tree that is not installed
    __version__ = "0+unknown"
