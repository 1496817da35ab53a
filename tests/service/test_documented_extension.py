"""The example of docs/extensions.md, found by its entry point."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

PROGRAM = """
import asyncio, sys
from service.settings import load_settings
from tests.service.web.apps import App

running = App(load_settings({"audit_file": sys.argv[1]}))
asyncio.run(running.request("GET", "/healthz"))
"""


def install(folder: Path) -> None:
    """Write the example and an installed package's metadata into a folder."""
    page = (REPOSITORY / "docs/extensions.md").read_text()
    [module] = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    [table] = re.findall(r"^(\[project\.entry-points.*?\n)\n", page, re.M | re.S)
    group, entry = table.replace('"', "").splitlines()
    (folder / "audit_log.py").write_text(module)
    metadata = folder / "vitserve_audit_log-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: vitserve-audit-log\nVersion: 0.1\n")
    section = group.strip("[]").removeprefix("project.entry-points.")
    (metadata / "entry_points.txt").write_text(f"[{section}]\n{entry}\n")


def test_documented_extension_works(tmp_path):
    install(tmp_path)
    answers = tmp_path / "answers.jsonl"

    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", PROGRAM, answers], env=environment, check=True)

    [line] = map(json.loads, answers.read_text().splitlines())
    assert (line["path"], line["status"]) == ("/healthz", 200)
