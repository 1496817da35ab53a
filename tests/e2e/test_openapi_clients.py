"""Tools that know the service from its OpenAPI document alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import Pictures, Serve, Served
from tests.fuzz.openapi import schemathesis
from tests.launcher import PATIENCE

pytestmark = pytest.mark.timeout(240)  # a server and a generator start

KEY = "one-of-the-keys"
CALL = """
import io, json, sys
from vitserve_client import AuthenticatedClient
from vitserve_client.api.classify import classify
from vitserve_client.models import ClassifyFilesBody
from vitserve_client.types import File

url, key, picture = sys.argv[1:]
raw = lambda: File(payload=open(picture, "rb"), file_name="picture.png")
with AuthenticatedClient(url, token=key) as client:
    answers = [classify.sync_detailed(client=client, body=body) for body in (ClassifyFilesBody(file=raw()), raw())]
print(json.dumps([[answer.status_code, answer.parsed.to_dict()] for answer in answers]))
"""


@pytest.fixture(scope="module")
def server(serve_module: Serve) -> Served:
    return serve_module(api_keys=KEY, metrics_public=False)


def run(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture(scope="module")
def generated(server: Served, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the client that openapi-python-client generates without a warning."""
    pytest.importorskip("openapi_python_client", reason="openapi-python-client is not installed")
    folder = tmp_path_factory.mktemp("generated")
    # Its hooks format what was generated, with whatever ruff the PATH has.
    (folder / "config.yml").write_text("post_hooks: []\npackage_name_override: vitserve_client\n")
    (folder / "openapi.json").write_text(server.get("/openapi.json").text)
    files = ["--path", "openapi.json", "--config", "config.yml", "--output-path", "vitserve_client"]
    done = run("-m", "openapi_python_client", "generate", "--meta=none", "--fail-on-warning", *files, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()
    return folder


@pytest.mark.parametrize(("key", "status"), [(KEY, 200), ("another", 401)], ids=["a key", "a wrong key"])
def test_a_generated_client_classifies_a_picture(
    server: Served, pictures: Pictures, generated: Path, tmp_path: Path, key: str, status: int
) -> None:
    picture = tmp_path / "picture.png"
    picture.write_bytes(pictures.files[0])

    done = run("-c", CALL, server.url, key, picture, folder=generated)

    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    assert [answer[0] for answer in answers] == [status, status]
    for _, document in answers:
        if status == 200:
            pictures.check(0, document)
        else:
            assert document["code"] == "unauthorized"


def test_schemathesis_finds_nothing(server: Served, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")

    done = schemathesis(server.url, "--max-examples=3", key=KEY, seed=1, folder=tmp_path, timeout=2 * PATIENCE)

    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert found, done.stdout
    assert found[1] == found[2]
    assert int(found[1]) > 100
    assert re.search(r"(\d+) selected / \1 total", done.stdout)  # none is left out
