"""pyproject.toml agrees with itself, and messages name ways to install that exist."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
# benchmarks/.peers holds environments of other projects.
SOURCES = [
    path
    for package in ("service", "model", "vitserve", "benchmarks")
    for path in (REPOSITORY / package).rglob("*.py")
    if ".peers" not in path.parts
]


def test_no_message_advises_a_package_that_no_index_has():
    advising = [str(path) for path in SOURCES if re.search(r"vitserve\[", path.read_text())]

    assert not advising


def test_extras_that_messages_name_exist():
    named = {name for path in SOURCES for name in re.findall(r"pip install -e '\.\[(\w+)\]'", path.read_text())}

    assert {"heic", "hub", "openvino", "figures"} <= named <= EXTRAS.keys()


@pytest.mark.parametrize("name", ["test", "check"])
def test_a_dependency_group_lists_what_the_extra_of_its_name_lists(name):
    others = [line for line in EXTRAS[name] if not line.startswith("vitserve[")]

    assert PYPROJECT["dependency-groups"][name] == others


def test_no_index_takes_an_upload():
    assert "Private :: Do Not Upload" in PYPROJECT["project"]["classifiers"]


def test_each_package_that_is_asked_for_is_tested_in_one_version_unless_torch_brings_it():
    asked = {_canonical(line) for lines in (PYPROJECT["project"]["dependencies"], *EXTRAS.values()) for line in lines}

    assert {"redis", "grpcio", "torch"} < asked
    assert asked - {"vitserve"} - _brought_by("torch") <= set(PINNED)
    assert len(PINNED) == len(set(PINNED))


def test_what_torch_brings_is_not_pinned_as_the_index_of_its_builds_has_few_versions():
    brought = _brought_by("torch")

    assert {"filelock", "mpmath", "markupsafe"} <= brought
    assert not brought & set(PINNED)


def _brought_by(package: str) -> set[str]:
    brought: set[str] = set()
    waiting = [package]
    while waiting:
        requirements = importlib.metadata.requires(waiting.pop()) or []
        names = {_canonical(line) for line in requirements if "extra ==" not in line and ";" not in line}
        waiting += names - brought
        brought |= names
    return brought


def _canonical(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


PINNED = [
    _canonical(line) for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if not line.startswith("#")
]
