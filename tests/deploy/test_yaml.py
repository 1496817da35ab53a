"""Every YAML file of the repository can be read by the strictest of its readers."""

from __future__ import annotations

import subprocess

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.strict_yaml import load_documents


def test_no_file_has_a_duplicate_key():
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.yml", "*.yaml"],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    files = [path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file()]
    files.remove(REPOSITORY / "mkdocs.yml")  # mkdocs reads it with tags of its own
    assert REPOSITORY / "docker-compose.yml" in files

    refused = []
    for path in files:
        try:
            load_documents(path)
        except yaml.YAMLError as error:
            refused.append(str(error))

    assert not refused, "\n".join(refused)
