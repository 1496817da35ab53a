"""The container image: labels, removed files, inputs of its build, and its health check."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.healthcheck import setting
from deploy.image.slim import slim
from tests.conftest import REPOSITORY
from tests.stub_server import answering

pytestmark = pytest.mark.timeout(60)  # processes start


DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
STAGES = re.findall(r"^FROM (\S+)(?: AS ([\w-]+))?$", DOCKERFILE, re.M)


def test_images_do_not_use_latest() -> None:
    compose = REPOSITORY / "docker-compose.yml"
    manifests = (REPOSITORY / "deploy/kubernetes").rglob("*.yaml")
    for file in (compose, REPOSITORY / "docker-compose.cpu.yml", *manifests):
        for image in re.findall(r"^\s*(?:- )?(?:image|newTag): (.*)$", file.read_text(), re.M):
            assert "latest" not in image, file
    assert "latest" not in DOCKERFILE
    pinned = dict(re.findall(r"image: \w+/(\w+):\$\{\w+:-v?([\d.]+)\}$", compose.read_text(), re.M))
    assert pinned.keys() == {"prometheus", "grafana"}
    assert all(version.count(".") == 2 for version in pinned.values())


def test_dockerignore_keeps_copied_files() -> None:
    kept = [
        line[1:]
        for line in (REPOSITORY / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        for source in line.split()[:-1]:
            assert (REPOSITORY / source).exists()
            assert any(Path(source).match(pattern) for pattern in kept), source


def test_each_variant_has_a_stage() -> None:
    stages = {name.removeprefix("system-") for _, name in STAGES if name.startswith("system-")}
    assert stages == {"cpu", "cuda", "cuda12"}
    (extras,) = re.findall(r'^ARG EXTRAS="(.*)"$', DOCKERFILE, re.M)
    assert {*extras.split(), "openvino"} <= PROJECT["optional-dependencies"].keys()


def test_slim_removes_only_unused_files(tmp_path: Path) -> None:
    unused = [
        "torch/test/t.py",
        "torch/bin/test_api",
        "torch/lib/libtorchbind_test.so",
        "sympy/core/tests/t.py",
    ]
    used = [
        "torch/bin/torch_shm_manager",
        "torch/include/a.h",
        "sympy/core/c.py",
        "openvino/libs/libopenvino.so.2641",
    ]
    for name in [*unused, *used]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1234")
    slim(tmp_path)
    assert sorted(
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()
    ) == sorted(used)


@pytest.mark.skipif(shutil.which("strip") is None, reason="strip (binutils) is not installed")
def test_stripped_library_still_loads(tmp_path: Path) -> None:
    import httptools.parser.parser as compiled

    library = tmp_path / "uvloop" / Path(compiled.__file__).name
    library.parent.mkdir()
    shutil.copy(compiled.__file__, library)
    before = library.stat().st_size
    slim(tmp_path)
    assert library.stat().st_size < before
    load = "import ctypes, sys; ctypes.PyDLL(sys.argv[1]).PyInit_parser"
    subprocess.run([sys.executable, "-c", load, library], check=True)


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


def test_unready_service_is_unhealthy():
    with service(503, b'{"code":"draining"}') as port:
        done = check(port)

    assert done.returncode == 1
    assert "503" in done.stderr
    assert "draining" in done.stderr
    assert "Traceback" not in done.stderr


def test_closed_port_is_unhealthy():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = check(port)

    assert done.returncode == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_health_check_bypasses_proxies(name):
    with service(200, b"") as port:
        assert check(port, **{name: "http://127.0.0.1:1", "no_proxy": ""}).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        (["/sbin/docker-init", "--", "vitserve", "serve", "--port", "9000", ""], "9000"),
        (["vitserve", "--port=9000", "--grpc-port", "1"], "9000"),
        (["vitserve", "serve"], "8001"),
        (["vitserve", "--port"], ""),
    ],
)
def test_health_check_reads_the_flags(arguments, port, monkeypatch):
    monkeypatch.setenv("VIT_PORT", "'8001'")
    assert setting("port", arguments) == port
