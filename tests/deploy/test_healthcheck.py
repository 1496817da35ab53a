"""The container's health check against small servers that answer as the service does."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.conftest import REPOSITORY
from tests.stub_server import answering

pytestmark = pytest.mark.timeout(60)  # processes start


@contextlib.contextmanager
def service(status: int, body: bytes) -> Iterator[int]:
    with answering(lambda asked: (status if asked.path == "/readyz" else 404, {}, body)) as url:
        yield int(url.rpartition(":")[2])


def check(port: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, REPOSITORY / "deploy/healthcheck.py"],
        env={**os.environ, "VIT_PORT": str(port), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_ready_service_is_healthy():
    with service(200, b'{"status":"ready"}') as port:
        assert check(port).returncode == 0


def test_a_service_that_is_not_ready_is_unhealthy_and_the_reason_is_told():
    with service(503, b'{"code":"draining"}') as port:
        done = check(port)

    assert done.returncode == 1
    assert "503" in done.stderr
    assert "draining" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_that_listens_is_unhealthy():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = check(port)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_proxy_in_the_environment_is_not_asked(name):
    with service(200, b"") as port:
        assert check(port, **{name: "http://127.0.0.1:1", "no_proxy": ""}).returncode == 0
