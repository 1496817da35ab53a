"""The examples of docs/extensions.md, found by their entry points."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.service.fakes import model_info

PROGRAM = """
import asyncio, json, sys
from service.settings import load_settings
from tests.service.web.apps import App

running = App(load_settings({"audit_file": sys.argv[1]}))
answers = [
    asyncio.run(running.classify(query=query, path="/best"))
    for query in ("min_score=0.1", "min_score=1", "least=1")
]
documents = [answers[0].json, answers[1].json]
print(json.dumps([*documents, answers[2].status, running.metric("best_total")]))
"""


def install(folder: Path) -> None:
    """Write the examples and their metadata into a folder, with the documented commands."""
    page = (REPOSITORY / "docs/extensions.md").read_text()
    audit, best = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (folder / "audit_log.py").write_text(audit)
    (folder / "best_label.py").write_text(best)
    [commands] = re.findall(r"^(mkdir.*?)^cd \.\.", page, re.M | re.S)
    entry = "echo best = best_label:EXTENSION >>entry_points.txt"
    subprocess.run(["bash", "-ec", commands + entry], cwd=folder, check=True)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, object]], object]:
    """The audited lines, and the answers of /best."""
    folder = tmp_path_factory.mktemp("extensions")
    install(folder)
    lines = folder / "answers.jsonl"
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", PROGRAM, str(lines)]
    printed = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    return [json.loads(line) for line in lines.read_text().splitlines()], json.loads(printed)


def test_documented_middleware_works(outcome):
    lines, _ = outcome

    assert [(line["path"], line["status"]) for line in lines] == [
        ("/best", 200),
        ("/best", 200),
        ("/best", 422),
    ]


def test_documented_route_answers(outcome):
    _, [answer, below_least_score, status_of_unknown_parameter, counted] = outcome

    assert answer["model"] == model_info().name
    assert answer["label"] in model_info().labels
    assert below_least_score == answer | {"label": None}
    assert status_of_unknown_parameter == 422
    assert counted == 2
