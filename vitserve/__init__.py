"""The package that programs import to call the service: `from vitserve.client import Client`."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vitserve")
except PackageNotFoundError:  # a working tree that was copied and not installed
    __version__ = "0+unknown"
