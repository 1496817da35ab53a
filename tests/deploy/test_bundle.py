"""The offline bundle: what is put into it, and that its check notices damage. Docker and pip are stand-ins here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.strict_yaml import load_documents

CONFIG = {"services": {"vitserve": {"build": {"args": {"TORCH_INDEX_URL": "https://cpu"}}}}}
DOCKER = f"""#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
  "compose config --images vitserve") echo vitserve:cpu ;;
  "compose config --images") printf '%s\\n' prom/prometheus:v1 vitserve:cpu ;;
  "compose config --format json") echo '{json.dumps(CONFIG)}' ;;
  "image inspect vitserve:cpu"|"image inspect --format "*) ;;
  "image inspect "*) exit 1 ;;
  "save "*) echo images ;;
  "run "*sbom.cdx.json) echo '{{}}' ;;
  "load "*) ;;
esac
"""
PYTHON = f"""#!/bin/sh
[ "$1" = -m ] || exec {sys.executable} "$@"
echo "$@" >>"$CALLS"
while [ "$1" != --wheel-dir ]; do shift; done
touch "$2/a.whl"
"""

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("bash", "sha256sum", "xargs"))), reason="bash or GNU's tools are not installed"
)


class Bundle:
    """A bundle made in `folder` by the scripts with stand-ins for docker and python."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.path = folder / "dist" / "bundle"
        self._calls = folder / "calls"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("docker", DOCKER), ("python", PYTHON)):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self._environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "CALLS": str(self._calls),
            "PYTHON": str(programs / "python"),
            **settings,
        }
        done = self.run(REPOSITORY / "deploy/bundle/make.sh", self.path)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)

    @property
    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    files = "docker-compose.yml:docker-compose.cpu.yml"
    return Bundle(tmp_path_factory.mktemp("bundle"), COMPOSE_FILE=files, PROMETHEUS_TAG="v1")


def test_a_bundle_has_everything_that_its_compose_files_name(bundle: Bundle) -> None:
    environment = dict(line.split("=", 1) for line in (bundle.path / ".env").read_text().splitlines())
    assert environment["PROMETHEUS_TAG"] == "v1"
    files = environment["COMPOSE_FILE"].split(":")
    assert files == ["docker-compose.yml", "docker-compose.cpu.yml", "docker-compose.offline.yml"]
    documents: list[dict[str, Any]] = [load_documents(bundle.path / name)[0] for name in files]
    services = documents[0]["services"]
    mounts = [mount for service in services.values() for mount in service.get("volumes", ())]
    for mount in mounts:
        source = mount.split(":")[0] if mount.startswith("./") else "."
        assert (bundle.path / source).exists(), mount
    offline = documents[-1]["services"]
    assert offline.keys() == services.keys()
    assert {service["pull_policy"] for service in offline.values()} == {"never"}


def test_images_that_are_missing_are_pulled_and_all_are_saved(bundle: Bundle) -> None:
    assert (bundle.path / "images.txt").read_text().split() == ["vitserve:cpu", "prom/prometheus:v1"]
    assert [call for call in bundle.calls if call.startswith("pull ")] == ["pull prom/prometheus:v1"]
    assert "save vitserve:cpu prom/prometheus:v1" in bundle.calls


def test_wheels_are_those_of_the_constraints_and_torch_comes_from_the_images_index(bundle: Bundle) -> None:
    first, second = [call for call in bundle.calls if call.startswith("-m pip wheel ")]
    assert first.endswith("--index-url https://cpu torch")
    assert "--index-url" not in second
    assert all("--constraint constraints.txt" in call for call in (first, second))
    (requirement,) = (bundle.path / "requirements.txt").read_text().split()
    assert requirement == second.split()[-1].replace(".[", "vitserve[")


def test_the_check_runs_the_image_without_a_network_and_notices_damage(bundle: Bundle) -> None:
    done = bundle.run(bundle.path / "check.sh", "images")
    assert done.returncode == 0, done.stderr
    assert bundle.calls[-1].startswith("run --rm --network none ")
    assert bundle.calls[-1].endswith(" vitserve:cpu classify /examples/dog.jpg")
    images = bundle.path / "images.tar.gz"
    good = images.read_bytes()
    images.write_bytes(good + b"\0")
    try:
        done = bundle.run(bundle.path / "check.sh", "images")
    finally:
        images.write_bytes(good)
    assert done.returncode != 0
    assert "images.tar.gz: FAILED" in done.stdout


def test_a_folder_that_exists_is_not_written_over(bundle: Bundle) -> None:
    done = bundle.run(REPOSITORY / "deploy/bundle/make.sh", bundle.path)
    assert done.returncode != 0
    assert "File exists" in done.stderr
