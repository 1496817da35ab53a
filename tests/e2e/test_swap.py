"""Swap the checkpoint under load: each answer comes from one model, and none is lost."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.checkpoints import write_checkpoint
from tests.e2e.load import Load
from tests.e2e.processes import Processes
from tests.e2e.serving import CHECKPOINT_NAME, LABELS, SIZE, Models, Pictures, Serve, Served
from tests.launcher import until

pytestmark = pytest.mark.timeout(300)  # engines start many times

OTHER_NAME = "other"
OTHER_LABELS = tuple(f"another {i}" for i in range(7))
OTHER_SIZE = (SIZE + 8, SIZE)
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def folder(tmp_path: Path, checkpoint: Path) -> Path:
    """Return a folder with two checkpoints of other labels and sizes, and a broken checkpoint."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(checkpoint, folder / CHECKPOINT_NAME)
    (folder / OTHER_NAME).mkdir()
    write_checkpoint(folder / OTHER_NAME, OTHER_NAME, OTHER_SIZE, OTHER_LABELS, seed=8)
    shutil.copytree(checkpoint, folder / "broken")
    (folder / "broken" / "model.safetensors").write_bytes(bytes(100))
    return folder


def load(server: Served, served: str, checkpoint: str) -> httpx.Response:
    path = f"/v2/repository/models/{served}/load"
    body = {"parameters": {"checkpoint": checkpoint}}
    return server.client.post(path, json=body, headers=ADMIN)


def in_turns(server: Served, pictures: Pictures, folder: Path, swaps: int) -> Counter[str]:
    """Swap under load, at last to a refused checkpoint; return how often each model answered."""
    names = [CHECKPOINT_NAME, OTHER_NAME]
    with Load(
        server,
        pictures,
        Models(pictures.files, [folder / name for name in names]).check,
        callers=4,
        pause=0.02,
    ) as running:
        running.more(CHECKPOINT_NAME)
        for swap in range(swaps):
            served = names[swap % 2]
            following = names[(swap + 1) % 2]
            assert load(server, served, following).status_code == 200
            # Every worker answers later requests with the new model.
            assert {server.get("/model").json()["name"] for _ in range(3)} == {following}
            running.more(following)
        served = names[swaps % 2]
        refused = load(server, served, "broken")
        assert refused.status_code == 422
        assert "broken" in refused.json()["error"]
        running.more(served)
    outcomes = running.stop()
    assert outcomes.keys() <= set(names), "none is lost, and none refused"
    return outcomes


def spoilt(folder: Path) -> list[str]:
    """Return the names of checkpoints that cannot be served; each once passed the checks."""
    for name, changes in (
        ("cold", {"temperature": 1e-300}),
        ("unsaid", {"labels": ["\ud800", *LABELS[1:]]}),
    ):
        shutil.copytree(folder / CHECKPOINT_NAME, folder / name)
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    shutil.copytree(folder / CHECKPOINT_NAME, folder / "pipe")
    (folder / "pipe" / "config.json").unlink()
    os.mkfifo(folder / "pipe" / "config.json")  # opening it blocks until a writer opens it
    return ["cold", "unsaid", "pipe"]


def reload(server: Served) -> None:
    """Reload the configured checkpoint."""
    server.process.process.send_signal(signal.SIGHUP)
    until(lambda: server.get("/model").json()["name"] == CHECKPOINT_NAME)
    assert server.metric("vit_model_info", model=CHECKPOINT_NAME) == 1
    assert server.metric("vit_model_info", model=OTHER_NAME) == 0


def test_swaps_lose_or_mix_no_request(serve: Serve, pictures: Pictures, folder: Path) -> None:
    server = serve(
        checkpoint=folder / CHECKPOINT_NAME,
        checkpoint_folder=folder,
        admin_key="admin",
        compile="auto",
    )
    outcomes = in_turns(server, pictures, folder, swaps=2)
    assert outcomes.total() > 4 * 30
    assert load(server, CHECKPOINT_NAME, OTHER_NAME).status_code == 200
    reload(server)
    assert server.process.terminate() == 0
    assert "Traceback" not in server.log


def test_an_engine_restart_keeps_the_swap(serve: Serve, pictures: Pictures, folder: Path) -> None:
    server = serve(
        workers=2,
        checkpoint=folder / CHECKPOINT_NAME,
        checkpoint_folder=folder,
        admin_key="admin",
    )
    in_turns(server, pictures, folder, swaps=1)
    until(lambda: len(Processes(server).all) == 3)  # the replaced engines have ended
    os.kill(Processes(server).engine, signal.SIGKILL)
    until(lambda: server.get("/readyz").status_code == 503)
    until(lambda: server.get("/readyz").status_code == 200)
    assert server.get("/model").json()["name"] == OTHER_NAME
    reload(server)
    assert server.process.terminate() == 0
    assert "Traceback" not in server.log


def test_a_bad_checkpoint_changes_nothing(serve: Serve, pictures: Pictures, folder: Path) -> None:
    options: dict[str, Any] = {"checkpoint": folder / CHECKPOINT_NAME, "checkpoint_folder": folder}
    server = serve(workers=2, admin_key="admin", **options)
    names = spoilt(folder)
    for count, name in enumerate(names, 1):
        refused = load(server, CHECKPOINT_NAME, name)
        assert (refused.status_code, "\n" in refused.json()["error"]) == (422, False), refused.text
        answer = server.client.post("/classify", content=pictures.files[0])
        assert answer.status_code == 200, answer.text
        pictures.check(0, answer.json())
        assert server.metric("vit_reloads_total", outcome="refused") == count
        assert server.metric("vit_last_reload_successful") == 0
        until(lambda: len(Processes(server).all) == 3)
    until(
        lambda: (
            server.log.count("the next checkpoint is refused, and the old one stays") == len(names)
        )
    )
    assert "CRITICAL" not in server.log
    assert load(server, CHECKPOINT_NAME, OTHER_NAME).status_code == 200
    assert (
        server.metric("vit_reloads_total", outcome="served"),
        server.metric("vit_last_reload_successful"),
    ) == (1, 1)
    assert (
        server.metric(
            "vit_model_info", model=OTHER_NAME, checkpoint=str((folder / OTHER_NAME).resolve())
        )
        == 1
    )
    until(lambda: f"{OTHER_NAME} from {(folder / OTHER_NAME).resolve()} (content" in server.log)
    assert server.process.terminate() == 0
    assert "Traceback" not in server.log
