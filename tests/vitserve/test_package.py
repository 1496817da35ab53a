"""The package that programs import to call the service."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import service.client
import vitserve
import vitserve.client
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.timeout(60)  # processes start

SERVER_ONLY = {"fastapi", "model", "numpy", "python_multipart", "starlette", "torch", "uvicorn"}


def test_the_client_is_imported_without_the_server() -> None:
    code = "import sys, vitserve.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    modules = set(done.stdout.split())
    assert "httpx" in modules
    assert not modules & SERVER_ONLY
    wings = {name.split(".")[1] for name in modules if name.startswith("service.")}
    assert wings == {"client", "schemas"}


def test_it_is_the_client_of_the_service() -> None:
    assert vitserve.client.Client is service.client.Client
    assert all(hasattr(vitserve.client, name) for name in vitserve.client.__all__)


def test_version_is_the_installed_one() -> None:
    assert vitserve.__version__ == version("vitserve")
    with pytest.raises(AttributeError, match="no attribute 'versio'"):
        vitserve.versio  # noqa: B018
