"""pyproject.toml is consistent, named ways to install exist, and `make` installs what it needs."""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.conftest import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# benchmarks/.peers contains environments of other projects.
SOURCES = [
    path
    for package in ("service", "model", "vitserve", "benchmarks")
    for path in (REPOSITORY / package).rglob("*.py")
    if ".peers" not in path.parts
]


def test_extras_that_messages_name_exist():
    named = {
        name
        for path in SOURCES
        for name in re.findall(r"pip install 'vitserve\[(\w+)\]'", path.read_text())
    }

    assert {"heic", "hub", "openvino"} <= named <= EXTRAS.keys()


@pytest.mark.parametrize("name", ["test", "check"])
def test_dependency_group_equals_its_extra(name):
    others = [line for line in EXTRAS[name] if not line.startswith("vitserve[")]

    assert PYPROJECT["dependency-groups"][name] == others


def test_changelog_has_section_of_version():
    version = re.escape(PYPROJECT["project"]["version"])
    changelog = (REPOSITORY / "CHANGELOG.md").read_text()

    # `make release-check` requires the section of the version.
    assert re.search(rf"^## \[(Unreleased\]|{version}\] - )", changelog, re.M)


def test_version_is_only_in_pyproject():
    version = PYPROJECT["project"]["version"]

    for name in (
        "Dockerfile",
        "Makefile",
        "docker-compose.yml",
        "docs/scaling.md",
        "deploy/kubernetes/base/deployment.yaml",
    ):
        assert version not in (REPOSITORY / name).read_text(), name


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("build")
    # In a copy, because a build writes into the source folder. Uses the installed setuptools.
    for name in ("model", "service", "vitserve", "deploy", "examples"):
        shutil.copytree(
            REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "constraints.txt",
    ):
        shutil.copy(REPOSITORY / name, tmp_path)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
        ".",
    ]
    subprocess.run(build, cwd=tmp_path, env=os.environ | {"VITSERVE_KERNEL": "no"}, check=True)

    (built,) = (tmp_path / "dist").iterdir()
    return built


@pytest.mark.timeout(120)
def test_wheel_holds_files_of_the_service(wheel):
    assert wheel.name == f"vitserve-{PYPROJECT['project']['version']}-py3-none-any.whl"
    names = {re.sub(r"^[^/]*\.data/data/", "", name) for name in zipfile.ZipFile(wheel).namelist()}
    assert {
        "model/weights/cifar10/model.safetensors",
        "service/extensions/teach/page/main.js",
        "service/web/page/index.html",
        "service/web/static/swagger_ui/swagger-ui-bundle.js.gz",
        "share/vitserve/grafana/vitserve.json",
        "share/vitserve/prometheus/rules/alerts.yml",
        "share/vitserve/examples/dog.jpg",
    } <= names
    assert not [
        name
        for name in names
        if name.startswith(("tests/", "benchmarks/")) or name.endswith((".so", ".c"))
    ]


@pytest.mark.timeout(120)
def test_the_client_installs_without_torch(wheel: Path, tmp_path: Path) -> None:
    (documented,) = re.findall(
        r"^pip install (httpx [a-z ]*?) *#", (REPOSITORY / "docs/api.md").read_text(), re.M
    )
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv/bin/python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # as pip does with --no-deps
        archive.extractall(packages)
    for name in _closure(documented.split()):
        for file in importlib.metadata.files(name) or []:
            if not file.parts[0].startswith("..") and "__pycache__" not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), packages / file)

    program = (
        "import sys, vitserve.client as c; c.Client('http://there').close(); "
        "print(c.__file__, 'numpy' in sys.modules)"
    )
    imported = subprocess.run(
        [python, "-I", "-c", program], capture_output=True, text=True, check=True
    )
    assert imported.stdout.split() == [str(packages / "vitserve/client.py"), "False"]
    command = subprocess.run(
        [python, "-I", "-m", "vitserve", "serve"], capture_output=True, text=True, check=False
    )
    assert command.returncode == 1
    assert re.fullmatch(
        r"vitserve: the package \w+ is not installed: .* pip install vitserve\n", command.stderr
    )


def test_required_packages_are_pinned_once():
    asked = {
        _canonical(line)
        for lines in (PYPROJECT["project"]["dependencies"], *EXTRAS.values())
        for line in lines
    }

    assert {"redis", "grpcio", "torch"} < asked
    assert asked - {"vitserve"} - _brought_by("torch") <= set(PINNED)
    assert len(PINNED) == len(set(PINNED))


def test_torch_dependencies_are_not_pinned():
    brought = _brought_by("torch")

    assert {"filelock", "mpmath", "markupsafe"} <= brought
    assert not brought & set(PINNED)


def _closure(packages: Iterable[str]) -> set[str]:
    """Return packages with all of their installed dependencies."""
    found: set[str] = set()
    waiting = list(packages)
    while waiting:
        name = waiting.pop()
        found.add(name)
        requirements = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        needed = {
            each.name
            for each in requirements
            if not each.marker or each.marker.evaluate({"extra": ""})
        }
        waiting += needed - found
    return found


def _brought_by(package: str) -> set[str]:
    brought: set[str] = set()
    waiting = [package]
    while waiting:
        requirements = importlib.metadata.requires(waiting.pop()) or []
        names = {
            _canonical(line) for line in requirements if "extra ==" not in line and ";" not in line
        }
        waiting += names - brought
        brought |= names
    return brought


def _canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


CONSTRAINTS = [
    line
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]
PINNED = [_canonical(line) for line in CONSTRAINTS]


@pytest.mark.parametrize("of", ["release", "site"])
def test_release_tools_are_locked_by_hash(of: str) -> None:
    folder = REPOSITORY / "deploy" / of
    asked = re.findall(
        r"^([\w-]+)(?:\[.*\])?(==\S+)$", (folder / "requirements.in").read_text(), re.M
    )
    locked = (folder / "requirements.txt").read_text()
    assert asked
    for name, version in asked:
        assert re.search(rf"^{name}{version} .*\\\n +--hash=sha256:", locked, re.M), (
            f"{name}: run `make locks`"
        )


def test_image_packages_are_locked_as_tested() -> None:
    lock = (REPOSITORY / "deploy/image/requirements.txt").read_text()
    locked = dict(re.findall(r"^([\w-]+)(==[^ ;]+)(?: ;.*)? \\\n +--hash=sha256:", lock, re.M))
    (extras,) = re.findall(r"^IMAGE_EXTRAS := (.*)$", (REPOSITORY / "Makefile").read_text(), re.M)
    asked = [
        *PYPROJECT["project"]["dependencies"],
        *(line for extra in extras.split() for line in EXTRAS[extra]),
    ]
    assert {_canonical(line) for line in asked} <= {"torch"} | locked.keys(), "run `make locks`"
    tested = {
        _canonical(line): line[line.index("==") :]
        for line in CONSTRAINTS
        if _canonical(line) in locked
    }
    assert tested == {name: version for name, version in locked.items() if name in tested}, (
        "run `make locks`"
    )
    assert "://" not in lock


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
PIP = """#!/bin/sh
echo "$@" >>"$(dirname "$0")/calls"
"""


def make(*arguments: str, **environment: str) -> str:
    # Independent of the environment of a `make test` that runs these tests.
    surrounding = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME"}}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(
        command,
        cwd=REPOSITORY,
        env=surrounding | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def install(folder: Path, *arguments: str, **environment: str) -> tuple[str, list[list[str]]]:
    """Run `make` with a pip that installs nothing; return its output and pip's calls."""
    pip = folder / "bin" / "pip"
    pip.parent.mkdir(parents=True)
    pip.write_text(PIP)
    pip.chmod(0o755)
    (folder / ".made").touch()
    output = make(f"VENV={folder}", f"{folder}/.run", *arguments, **environment)
    return output, [shlex.split(line) for line in (pip.parent / "calls").read_text().splitlines()]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("given_in", ["arguments", "environment"])
def test_only_torch_comes_from_named_index(tmp_path, given_in):
    if given_in == "arguments":
        output, calls = install(tmp_path, f"TORCH_INDEX_URL={CPU_INDEX}")
    else:
        output, calls = install(tmp_path, TORCH_INDEX_URL=CPU_INDEX)

    first, second = calls
    assert first[-3:] == ["--index-url", CPU_INDEX, "torch"]
    assert second[-2:] == ["-e", ".[openvino]"]
    assert "--index-url" not in second
    assert all(call[call.index("-c") + 1] == "constraints.txt" for call in calls)
    assert "NVIDIA" not in output


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("docker", "lines"),
    [(None, ["docker is missing"]), ("exit 1", ["docker has no compose", "docker-compose-plugin"])],
)
def test_make_image_names_missing_tools(tmp_path, docker, lines):
    for name in ("make", "sh", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    if docker is not None:
        (tmp_path / "docker").write_text(f"#!/bin/sh\n{docker}\n")
        (tmp_path / "docker").chmod(0o755)
    command = ["make", "--no-print-directory", "image"]
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode != 0
    assert [line for line in lines if line not in done.stderr] == []
    assert "https://docs.docker.com/" in done.stderr
