"""The heads of a web process: they follow the file, and one process at a time fits."""

import asyncio
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from model.extensions.taught.taught_heads import Features, TaughtHead
from service.errors import ModelFailed
from service.extensions.teach import heads as module
from service.extensions.teach.errors import HeadWithoutBackbone
from service.extensions.teach.examples import Examples
from service.extensions.teach.heads import TaughtHeads, features_of
from service.models.local_model import LocalModel
from tests.extensions.teach.clusters import taught, teach
from tests.service.fakes import FixedModels, on_a_loop
from tests.service.web.fake_engine import FakeEngine


async def until(found: Callable[[], bool], heads: TaughtHeads) -> None:
    while not found():
        await heads.look()
        await asyncio.sleep(0.01)  # the process that fits has its own core


async def end(heads: TaughtHeads) -> None:
    """Stop the fitting process, which waits for changes."""
    assert heads.child is not None
    heads.child.kill()
    await heads.child.wait()


def fitted_to(heads: TaughtHeads) -> int:
    taught = heads.heads.get("pets")
    return -1 if taught is None or taught.fitted is None else taught.row.fitted_revision


@on_a_loop
async def test_every_process_sees_a_fitted_head(tmp_path: Path) -> None:
    heads = [TaughtHeads(Examples(tmp_path), None, FixedModels({})) for _ in range(2)]
    tasks = [asyncio.create_task(each.watch()) for each in heads]
    looker = TaughtHeads(Examples(tmp_path), None, FixedModels({}))
    teach(Examples(tmp_path))
    await until(lambda: all(fitted_to(each) == 3 for each in heads), looker)
    first, second = (each.heads["pets"] for each in heads)
    assert first.fitted is not None
    assert second.fitted is not None
    assert first.fitted.statistics == second.fitted.statistics, "it has the moment of the fit"
    teach(Examples(tmp_path), seed=1)
    heads[0].changed()
    await until(lambda: all(fitted_to(each) == 6 for each in heads), looker)
    store = Examples(tmp_path)
    store.remove(store.head("pets"))
    await until(lambda: not any("pets" in each.heads for each in heads), looker)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("pause", [0.0, 3600.0])
def test_a_killed_fit_is_repeated_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float
) -> None:
    monkeypatch.setattr(module, "_PAUSE_SECONDS", pause)

    async def kill_and_look() -> None:
        store = Examples(tmp_path)
        teach(store)
        heads = TaughtHeads(store, None, FixedModels({}))
        await heads.look()
        await end(heads)
        await heads.look()
        await heads.look()
        assert (heads.child is not None) == (pause == 0)
        if heads.child is None:
            teach(store, seed=1)
        await until(lambda: fitted_to(heads) >= 3, heads)
        await end(heads)

    asyncio.run(kill_and_look())


@on_a_loop
async def test_two_processes_never_fit_at_once(tmp_path: Path) -> None:
    store = Examples(tmp_path)
    teach(store)
    with (tmp_path / "fit.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        heads = TaughtHeads(store, None, FixedModels({}))
        await heads.look()
        assert heads.child is None
    await heads.look()
    assert heads.child is not None
    await until(lambda: fitted_to(heads) == 3, heads)
    own, its = (os.getpriority(os.PRIO_PROCESS, number) for number in (0, heads.child.pid))
    assert its == min(own + 10, 19), "low, and not so low that a busy service never has the head"
    await end(heads)


def states(models: FixedModels) -> dict[str, tuple[str, str]]:
    return {each.name: (each.state, each.reason) for each in models.describe()}


@on_a_loop
async def test_changed_head_files_are_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "pets.safetensors"
    content = taught()[0].to_bytes()
    models = FixedModels({})
    heads = TaughtHeads(None, tmp_path, models)
    (tmp_path / "weights.safetensors").write_bytes(save({"weight": np.zeros(1, np.float32)}))
    (tmp_path / "my pets.safetensors").write_bytes(content)
    path.write_bytes(content[:-1])
    damaged = {"pets": ("failed", "pets.safetensors: not a taught head, or damaged")}
    for _ in range(2):
        await heads.look()
        assert states(models) == damaged
    assert [("my pets" in line, "damaged" in line) for line in sorted(caplog.messages)] == [
        (False, True),
        (True, False),
    ]
    with path.open("ab") as file:
        file.write(content[-1:])
    await heads.look()
    fitted = heads.heads["pets"].fitted
    assert fitted is not None
    with path.open("r+b") as file:
        file.write(fitted._replace(model="other").to_bytes())
    await heads.look()
    assert heads.heads["pets"].row.model == "other"
    path.write_bytes(b"")
    await heads.look()
    assert states(models) == {}


def written(**changes: Any) -> bytes:
    """Copy the file of a head with some of its arrays and texts replaced."""
    content = taught()[0].to_bytes()
    with_metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])[
        "__metadata__"
    ]
    arrays = load(content) | {
        name: each for name, each in changes.items() if isinstance(each, np.ndarray)
    }
    return save(
        arrays,
        with_metadata | {name: each for name, each in changes.items() if isinstance(each, str)},
    )


def test_hidden_characters_of_a_head_file_load() -> None:
    content = written(labels='["cat", "dog", "cat\\u200b"]')
    head = TaughtHead.from_bytes(content, "pets").head
    assert head.labels == ("cat", "dog", "cat\u200b")


NOT_FINITE = np.full((3, 24), np.nan, np.float32)
BAD_HEADS = {
    "deep": (written(labels="[" * 5_000 + "]" * 5_000), ""),
    "no text": (
        written(labels='["cat", "dog", 3]'),
        ": labels: '', number 3: expected 1 to 256 characters",
    ),
    "twice": (written(labels='["cat", "dog", "cat"]'), ": a label comes twice"),
    "controls": (written(labels='["cat", "dog", "\\u0007"]'), "characters that print"),
    "nan weight": (written(weight=NOT_FINITE), ": weight: numbers are not finite"),
    "float64": (
        written(weight=NOT_FINITE.astype(np.float64)),
        "weight float64, not bias float32",
    ),
    "nan temperature": (written(temperature="nan"), ": temperature: expected "),
    "no temperature": (written(temperature="0"), ": temperature: expected "),
    "infinite limit": (written(limit="inf"), ": limit: expected a finite number"),
    "no examples": (
        written(known=np.zeros((0, 24), np.float16)),
        "known has shape (0, 24)",
    ),
    "one dimension": (
        written(known=np.zeros(24, np.float16)),
        "known has shape (24,)",
    ),
    "other width": (
        written(known=np.zeros((2, 25), np.float16)),
        "weight has shape (3, 24), not (3, 25)",
    ),
}


@pytest.mark.parametrize("kind", BAD_HEADS)
@on_a_loop
async def test_a_bad_file_costs_its_own_head_alone(tmp_path: Path, kind: str) -> None:
    content, reason = BAD_HEADS[kind]
    models = FixedModels({})
    heads = TaughtHeads(None, tmp_path, models)
    (tmp_path / "bad.safetensors").write_bytes(content)
    (tmp_path / "good.safetensors").write_bytes(taught()[0].to_bytes())
    await heads.look()
    state, told = states(models)["bad"]
    assert state == "failed"
    assert told.startswith("bad.safetensors: not a taught head, or damaged")
    assert reason in told
    with pytest.raises(ModelFailed):
        models.key("bad")
    assert heads.heads["good"].fitted is not None


@on_a_loop
async def test_an_oversized_file_is_not_read(tmp_path: Path) -> None:
    models = FixedModels({})
    path = tmp_path / "bad.safetensors"
    path.write_bytes(taught()[0].to_bytes())
    os.truncate(path, 100 << 30)
    await TaughtHeads(None, tmp_path, models).look()
    told = "bad.safetensors: 107374182400 bytes: a taught head has at most 134217728"
    assert states(models) == {"bad": ("failed", told)}


@on_a_loop
async def test_a_head_of_another_width_is_failed(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    models = FixedModels({"model": LocalModel(lambda _: engine)})
    backbone = features_of(engine.info, Features())
    (tmp_path / "wide.safetensors").write_bytes(taught()[0]._replace(backbone=backbone).to_bytes())
    await TaughtHeads(None, tmp_path, models).look()
    assert states(models)["wide"] == ("failed", "it reads 24 features, and its backbone gives 8")
    with pytest.raises(HeadWithoutBackbone, match="wide: it reads 24 features"):
        models.key("wide")


@on_a_loop
async def test_a_damaged_fit_is_not_waited_for(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    models = FixedModels({"model": LocalModel(lambda _: engine)})
    store = Examples(tmp_path)
    store.add(
        "pets",
        "cat",
        np.ones((1, 8), np.float32),
        "",
        (features_of(engine.info, Features()), "model"),
    )
    store.keep(store.head("pets"), written(temperature="nan"))
    await TaughtHeads(store, None, models).look()
    state, told = states(models)["pets"]
    assert state == "failed"
    assert told.endswith("add or remove an example to fit it again")


@on_a_loop
async def test_a_failed_fit_is_told_to_callers(tmp_path: Path) -> None:
    engine: Any = FakeEngine()
    models = FixedModels({"model": LocalModel(lambda _: engine)})
    store = Examples(tmp_path)
    backbone = (features_of(engine.info, Features()), "model")
    for label in ("cat", "dog"):
        store.add("pets", label, np.ones((4, 8), np.float32), "", backbone)
    heads = TaughtHeads(store, None, models)
    await heads.look()
    assert "its fit failed" not in states(models)["pets"][1]
    await end(heads)  # as it ends if the disk is full
    await heads.look()
    state, told = states(models)["pets"]
    assert state == "failed"
    assert told.startswith("its fit failed")


@on_a_loop
async def test_an_unreadable_folder_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = TaughtHeads(None, tmp_path / "models", FixedModels({}))
    look = heads.look
    turns = iter([0, 0, 1, 1, 0, 0])

    async def next_look() -> None:
        is_there = next(turns, None)
        if is_there is None:
            raise asyncio.CancelledError
        if is_there:
            (tmp_path / "models").mkdir(exist_ok=True)
        elif (tmp_path / "models").exists():
            (tmp_path / "models").rmdir()
        await look()

    monkeypatch.setattr(heads, "look", next_look)
    monkeypatch.setattr("service.extensions.teach.heads._LOOK_SECONDS", 0)
    with pytest.raises(asyncio.CancelledError):
        await heads.watch()
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "taught heads cannot be read or written"
    ] * 2


@on_a_loop
async def test_a_taken_head_name_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = FakeEngine()
    store = Examples(tmp_path)
    models = FixedModels({"model": LocalModel(lambda _: engine)})
    teach(store)
    for name in ("pets", "model", "own"):
        (tmp_path / f"{name}.safetensors").write_bytes(taught()[0].to_bytes())
    heads = TaughtHeads(store, tmp_path, models)
    await heads.look()
    heads.renew()
    told = "another model, or a head of VIT_TEACH, has this name and answers instead"
    assert caplog.messages == [f"head model: {told}", f"head pets: {told}"]
    assert (set(models.heads), heads.heads["pets"].row.id > 0) == ({"own", "pets"}, True)
    await end(heads)
