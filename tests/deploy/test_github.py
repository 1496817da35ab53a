"""GitHub and pre-commit run the same commands as a clone; all YAML is valid for strict readers."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

from tests.conftest import REPOSITORY
from tests.strict_yaml import load_document, load_documents


def test_workflow_runs_ci_on_oldest_python():
    job = load_document(REPOSITORY / ".github/workflows/ci.yml")["jobs"]["checks"]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]

    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    assert project["requires-python"] == f">={job['strategy']['matrix']['python'][0]}"
    assert (
        f"cpu) index={job['env']['TORCH_INDEX_URL']} ;;" in (REPOSITORY / "Dockerfile").read_text()
    )


def test_pre_commit_runs_tools_of_make_check():
    (repository,) = load_document(REPOSITORY / ".pre-commit-config.yaml")["repos"]
    recipe = (
        (REPOSITORY / "Makefile")
        .read_text()
        .split("\ncheck: ")[1]
        .split("\n\n")[0]
        .splitlines()[1:]
    )

    hooks = [shlex.split(hook["entry"]) for hook in repository["hooks"]]
    tools = [shlex.split(line.replace("$(BIN)", ".venv/bin")) for line in recipe]
    # ruff's subcommand counts; other programs do not have subcommands
    assert [hook[:2] for hook in hooks] == [tool[:2] for tool in tools]


def test_release_has_version_of_its_tag():
    workflow = load_document(REPOSITORY / ".github/workflows/release.yml")
    uses = re.findall(
        r"uses: (\S+)",
        "".join(path.read_text() for path in (REPOSITORY / ".github/workflows").glob("*.yml")),
    )

    assert 'test "$TAG" = "v$(make --silent version)"' in [
        step.get("run") for step in workflow["jobs"]["distributions"]["steps"]
    ]
    assert {
        entry["variant"] for entry in workflow["jobs"]["images"]["strategy"]["matrix"]["include"]
    } == {
        "cpu",
        "cuda",
        "cuda12",
    }
    assert uses and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action) for action in uses)


def test_no_file_has_a_duplicate_key():
    try:
        listed = subprocess.run(
            [
                "git",
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
                "*.yml",
                "*.yaml",
            ],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"not a git checkout: {error}")
    files = [path for name in listed.split("\0") if name and (path := REPOSITORY / name).is_file()]
    files.remove(REPOSITORY / "mkdocs.yml")  # mkdocs reads it with its own tags
    assert REPOSITORY / "docker-compose.yml" in files

    refused = []
    for path in files:
        try:
            load_documents(path)
        except yaml.YAMLError as error:
            refused.append(str(error))

    assert not refused, "\n".join(refused)
