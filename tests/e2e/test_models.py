"""A service with twelve heads on one backbone and a second backbone, in one process or several."""

import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from model.checkpoint import load_checkpoint, native
from tests.e2e.checkpoints import write_checkpoint
from tests.e2e.serving import LABELS, SIZE, Models, Pictures, Serve, Served
from tests.launcher import until

pytestmark = pytest.mark.timeout(300)

HEADS = tuple(f"head{index:02}" for index in range(12))
OTHER = "other"
ADMIN = {"Authorization": "Bearer admin"}
REQUESTS = int(os.environ.get("VIT_TEST_REQUESTS", "150"))
"""Requests of the test under loads and unloads; releases send 20,000."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return twelve models that differ only in the head, and another model.

    Model N has N + 2 classes.
    """
    root = tmp_path_factory.mktemp("models")
    base = load_checkpoint(str(write_checkpoint(root, "base", (SIZE, SIZE), LABELS, seed=7)))
    models = root / "folder"
    models.mkdir()
    for number, name in enumerate(HEADS):
        classes = number + 2
        generator = torch.Generator().manual_seed(number)
        tensors = dict(base.tensors)
        tensors["head.weight"] = torch.randn(classes, 32, generator=generator) / 4
        tensors["head.bias"] = torch.randn(classes, generator=generator)
        config = base.config.model_copy(update={"num_classes": classes})
        labels = tuple(f"{name} {index}" for index in range(classes))
        (models / name).mkdir()
        own = replace(base, name=name, config=config, tensors=tensors, labels=labels)
        native.write(models / name, own, dtype=torch.float32)
    (models / OTHER).mkdir()
    write_checkpoint(models / OTHER, OTHER, (SIZE + 8, SIZE), ("x", "y", "z"), seed=8)
    return models


@pytest.fixture(scope="module")
def expected(folder: Path, pictures: Pictures) -> Models:
    return Models(pictures.files[:6], [folder / name for name in (*HEADS, OTHER)])


def ready(server: Served) -> bool:
    return all(each["state"] == "ready" for each in server.get("/models").json())


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two workers"])
def server(request: pytest.FixtureRequest, serve_module: Serve, folder: Path) -> Iterator[Served]:
    """Serve all models, and stop in order after the last test."""
    server = serve_module(
        checkpoint="",
        models=folder,
        checkpoint_folder=folder,
        admin_key="admin",
        workers=request.param,
    )
    until(lambda: ready(server))
    yield server
    assert server.process.terminate() == 0
    assert "Traceback" not in server.log


def test_each_model_answers_as_it_does_alone(server: Served, expected: Models) -> None:
    listed = {each["name"]: each for each in server.get("/models").json()}
    assert len({listed[name]["backbone"] for name in HEADS}) == 1
    assert listed[OTHER]["backbone"] != listed[HEADS[0]]["backbone"]
    for picture, name in itertools.product(range(3), (*HEADS, OTHER)):
        answer = (
            server.classify(expected.files[picture], f"model={name}&top_k=2")
            .raise_for_status()
            .json()
        )
        assert expected.check(picture, answer) == name
    before = server.metric("vit_batches_total")
    answer = server.classify(expected.files[0], "model=*").raise_for_status().json()
    assert list(answer["models"]) == [*HEADS, OTHER]
    for name, document in answer["models"].items():
        assert expected.check(0, document) == name
    assert server.metric("vit_batches_total") == before + 2, "one pass a backbone"
    assert server.metric("vit_images_total", model=HEADS[3]) == 4
    drawn = server.client.get(
        f"/attention?id={answer['id']}&model={HEADS[5]}&format=json&class=1"
    ).raise_for_status()
    assert drawn.json()["label"] == f"{HEADS[5]} 1"


def change_models(server: Served, over: threading.Event) -> None:
    """Replace, unload and delete models until `over` is set."""
    for turn in itertools.count():
        if over.is_set():
            return
        body = {"checkpoint": HEADS[turn % 2]}
        statuses = [server.client.put("/models/guest", json=body, headers=ADMIN).status_code]
        path = f"/v2/repository/models/{[OTHER, HEADS[3]][turn % 2]}/unload"
        statuses.append(server.client.post(path, headers=ADMIN).status_code)
        if turn % 3 == 2:
            statuses.append(server.client.delete("/models/guest", headers=ADMIN).status_code)
        assert set(statuses) <= {200, 201, 204, 404, 409}, statuses


def test_changing_models_lose_no_request(server: Served, expected: Models) -> None:
    names = [*HEADS, OTHER, "guest"]
    over = threading.Event()
    outcomes = Counter[str]()
    numbers = itertools.count()

    def ask(_: int) -> None:
        chosen = random.Random(_)
        while next(numbers) < REQUESTS:
            name = chosen.choice(names)
            picture = chosen.randrange(len(expected.files))
            answer = server.classify(expected.files[picture], f"model={name}&top_k=2")
            if name == "guest" and answer.status_code == 404:
                outcomes["gone"] += 1
                continue
            assert answer.status_code == 200, answer.text
            document = answer.json()
            # A guest is one of two models, in any order of swaps.
            label = document["predictions"][0]["label"].rpartition(" ")[0]
            assert document["model"] == name
            expected.check(picture, document | {"model": label if name == "guest" else name})
            outcomes[name] += 1

    with ThreadPoolExecutor(7) as pool:
        changing = pool.submit(change_models, server, over)
        asking = [pool.submit(ask, seed) for seed in range(6)]
        try:
            for each in asking:
                each.result()
        finally:
            over.set()
        changing.result()
    assert outcomes.total() >= REQUESTS
    assert set(outcomes) >= {*HEADS, OTHER}
    assert server.metric("vit_model_loads_total", result="loaded") > len(HEADS) + 2


def test_a_broken_entry_spares_the_others(
    serve: Serve, folder: Path, tmp_path: Path, pictures: Pictures
) -> None:
    for name in HEADS[:2]:
        (tmp_path / name).symlink_to(folder / name)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").touch()
    (tmp_path / "half.toml").write_text(f'checkpoint = "{folder / OTHER}"\nlabels = "nowhere.txt"')
    server = serve(checkpoint="", models=tmp_path, checkpoint_folder=folder)
    until(lambda: all(each["state"] != "loading" for each in server.get("/models").json()))
    assert {each["name"]: each["state"] for each in server.get("/models").json()} == {
        HEADS[0]: "ready", HEADS[1]: "ready", "empty": "failed", "half": "failed"
    }  # fmt: skip
    assert server.log.count("model empty: ") == server.log.count("model half: ") == 1
    server.classify(pictures.files[0], f"model={HEADS[1]}&top_k=1").raise_for_status()
    refused = server.classify(pictures.files[0], "model=empty")
    assert (refused.status_code, refused.json()["code"]) == (503, "model_failed")
    assert "retry-after" not in refused.headers
    assert server.metric("vit_model_state", model="empty", state="failed") == 1
    assert server.metric("vit_model_state", model=HEADS[0], state="failed") == 0
    strict = serve(checkpoint="", models=tmp_path, strict="true", wait=False)
    assert strict.process.process.wait(100) == 1
