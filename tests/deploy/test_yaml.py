"""Every YAML file of the repository can be read by the strictest of its readers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from tests.strict_yaml import load_documents

REPOSITORY = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize(
    "text",
    ["a: 1\nb: 2\na: 3\n", "a:\n  - {b: 1, 'b': 2}\n", "a:\na:\n", "a: 1\n---\nb:\n  c: 1\n  c: 1\n"],
    ids=["top level", "nested and quoted", "without values", "second document"],
)
def test_the_loader_refuses_a_duplicate_key(tmp_path, text):
    file = tmp_path / "file.yml"
    file.write_text(text)
    list(yaml.safe_load_all(text))

    with pytest.raises(yaml.YAMLError, match=r"found duplicate key '[abc]'\s+in \".*file.yml\", line"):
        load_documents(file)


def test_the_loader_takes_a_key_that_overrides_a_merged_one(tmp_path):
    file = tmp_path / "file.yml"
    file.write_text("base: &base {a: 1, b: 2}\nother: {<<: *base, a: 3}\n---\na: 4\n")

    assert load_documents(file) == [{"base": {"a": 1, "b": 2}, "other": {"a": 3, "b": 2}}, {"a": 4}]
