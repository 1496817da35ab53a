"""Models by name in one process: load one at a time, share, unload, replace and delete."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from model.errors import CheckpointError
from service.engine.backbones import Backbones
from service.engine.messages import ModelInfo
from service.errors import (
    CheckpointRefused,
    DefaultModel,
    ModelFailed,
    ModelsFull,
    NameTaken,
    SwapUnderWay,
    UnknownModel,
)
from service.models.configured import configured_models
from service.models.local_models import LocalModels
from service.settings import Settings, load_settings
from tests.service.fakes import (
    PATIENCE,
    FakePredictor,
    holding,
    model_info,
    on_a_loop,
    request_for,
)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Disk:
    """A loader whose models share a predictor if their names are equal up to a dot."""

    broken: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    live: dict[str, FakePredictor] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    retired: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def load(self, settings: Settings, _: object) -> tuple[FakePredictor, ModelInfo]:
        assert self.gate.wait(PATIENCE)
        name = Path(settings.checkpoint).name
        self.loads.append(name)
        if name in self.broken:
            raise CheckpointError(f"{name}: it cannot be read")
        backbone = name.partition(".")[0]
        predictor = self.live.setdefault(backbone, FakePredictor(size=100))
        predictor.heads[name] = name
        return predictor, model_info(name=settings.model_name or name, backbone=backbone, head=name)

    def retire(self) -> None:
        self.retired += 1


def entry(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.json").touch()


@asynccontextmanager
async def running(
    folder: Path, *names: str, **settings: Any
) -> AsyncIterator[tuple[LocalModels, Disk]]:
    """Run the models of a folder; without names, a single checkpoint."""
    disk = Disk()
    broken = [name for name in names if name.startswith("!")]
    disk.broken = {name[1:] for name in broken}
    for name in names:
        entry(folder / name.removeprefix("!"))
    own = load_settings({"models": str(folder) if names else None, **settings})
    pool = Backbones(own, disk.load, lambda _: None)
    models = LocalModels(own, pool.engine, configured_models(own), on_retired=disk.retire)
    models.start(lambda: None)
    try:
        await until(lambda: not models._tasks._running)
        yield models, disk
    finally:
        disk.gate.set()
        for predictor in disk.live.values():
            predictor.gate.set()
        await models.close()


def states(models: LocalModels) -> dict[str, str]:
    return {status.name: status.state for status in models.describe()}


def backbones(models: LocalModels) -> dict[str, int]:
    """Return the bytes of each loaded backbone."""
    return {status.backbone: status.bytes for status in models.describe() if status.bytes}


async def ask(models: LocalModels, name: str, red: int = 3) -> int:
    """Return the launches of the predictor that answered."""
    await models.load(name)
    version = models.served[name].current
    with holding(version):
        return (await version.engine.infer(request_for(red), timeout=PATIENCE)).batch_size


@on_a_loop
async def test_equal_backbones_share_an_engine(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a.1", "a.2", "b.1") as (models, disk):
        assert states(models) == {"a.1": "ready", "a.2": "ready", "b.1": "ready"}
        one, two, other = (models.served[name].current.engine for name in ("a.1", "a.2", "b.1"))
        assert one.backbone is two.backbone is not other.backbone
        assert len(models.statuses()) == 2
        assert backbones(models) == {"a": 100, "b": 100}
        assert set(disk.live["a"].heads) == {"a.1", "a.2"}
        assert disk.live["a"].warm_ups == 1
        await models.delete("a.2")
        await until(lambda: disk.retired == 1)
        assert set(disk.live["a"].heads) == {"a.1"}
        assert await ask(models, "a.1") == 1
        await models.delete("b.1")
        await until(lambda: disk.retired == 2)
        assert other.status.state == "closed"


@on_a_loop
async def test_a_closed_model_frees_its_backbone() -> None:
    disk = Disk()
    told = list[str]()
    pool = Backbones(load_settings(), disk.load, lambda _: None)
    one, two = (pool.engine({"checkpoint": name}) for name in ("a.1", "a.2"))
    one.start(lambda: None)
    await until(lambda: one.ready)
    two.start(lambda: told.append(two.status.state))
    while len(pool.users[one.backbone]) < 2:  # the event loop is blocked
        time.sleep(0.001)
    await two.close()
    assert (set(disk.live["a"].heads), told) == ({"a.1"}, ["ready"])
    await one.close()
    assert (one.status.state, pool.users) == ("closed", {})


@on_a_loop
async def test_a_close_is_told_to_those_waiting() -> None:
    disk = Disk()
    told = list[str]()
    disk.gate.clear()
    engine = Backbones(load_settings(), disk.load, lambda _: None).engine({"checkpoint": "a"})
    engine.start(lambda: told.append(engine.status.state))
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    disk.gate.set()
    await closing
    assert told == ["closed"]


@on_a_loop
async def test_a_broken_model_spares_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, "a", "!b", "c") as (models, _):
        assert states(models) == {"a": "ready", "b": "failed", "c": "ready"}
        assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
            "model b: b: it cannot be read"
        ]
        assert models.failure == ""
        with pytest.raises(ModelFailed, match="b: b: it cannot be read"):
            await models.load("b")
        with pytest.raises(UnknownModel, match="unknown model 'd'; available: a, b, c"):
            models.key("d")
        assert models.results == {"loaded": 2, "failed": 1}


@on_a_loop
async def test_broken_toml_is_a_failed_model(tmp_path: Path) -> None:
    (tmp_path / "b.toml").write_text("colour = 1")
    async with running(tmp_path, "a") as (models, _):
        assert states(models) == {"a": "ready", "b": "failed"}
        assert models.failure == ""
        with pytest.raises(ModelFailed, match=r"b\.toml: colour: unknown name"):
            await models.load("b")


@on_a_loop
async def test_a_refusal_names_the_file_and_its_key(tmp_path: Path) -> None:
    entry(tmp_path / "a")
    (tmp_path / "a.toml").write_text("image_size = 30")
    own = load_settings({"models": str(tmp_path), "labels": "numbers"})

    def load(_: Settings, __: object) -> tuple[FakePredictor, ModelInfo]:
        raise CheckpointError(
            "a: give --image-size 32x32 (VIT_IMAGE_SIZE) or leave VIT_IMAGE_SIZE (--image-size) "
            "out, see VIT_LABELS and VIT_MODELS"
        )

    pool = Backbones(own, load, lambda _: None)
    models = LocalModels(own, pool.engine, configured_models(own), on_retired=lambda: None)
    models.start(lambda: None)
    await until(lambda: states(models) == {"a": "failed"})
    [status] = models.describe()
    assert status.reason == (
        'a: give image_size = "32x32" in a.toml or leave image_size out, '
        "see VIT_LABELS and VIT_MODELS"
    ), "VIT_LABELS is the service's own"
    await models.close()


@on_a_loop
async def test_a_failed_model_is_refused_for_good(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "!b") as (models, disk):
        with pytest.raises(ModelFailed, match="b: it cannot be read"):
            await models.load("b")
        disk.broken.clear()
        await models.put("b", None)
        await models.load("b")


@on_a_loop
async def test_a_broken_model_ends_a_strict_start(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "!b", strict="true") as (models, _):
        assert models.failure == "b: it cannot be read"


@on_a_loop
async def test_the_longest_unused_backbone_goes(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a.1", "b.1", "b.2", "c", "d", models_bytes="300") as (models, _):
        # The first start fills the memory, and unloads the others until a request.
        assert states(models) == {
            "a.1": "ready",
            "b.1": "ready",
            "b.2": "ready",
            "c": "ready",
            "d": "unloaded",
        }
        await ask(models, "c")
        await ask(models, "b.2")
        await ask(models, "d")
        assert states(models) == {
            "a.1": "ready",
            "b.1": "ready",
            "b.2": "ready",
            "c": "unloaded",
            "d": "ready",
        }
        await ask(models, "b.1")
        await ask(models, "d")
        await ask(models, "c")
        assert states(models) == {
            "a.1": "ready",
            "b.1": "unloaded",
            "b.2": "unloaded",
            "c": "ready",
            "d": "ready",
        }
        assert models.results["evicted"] == 2
        assert sum(backbones(models).values()) == 300


@on_a_loop
async def test_a_start_describes_every_model(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", "!c", "d", models_bytes="100") as (models, _):
        assert states(models) == {"a": "ready", "b": "unloaded", "c": "failed", "d": "unloaded"}
        assert all(model.info for name, model in models.served.items() if name != "c")
        assert models.results == {"loaded": 3, "failed": 1}


@on_a_loop
async def test_a_full_default_model_loads_no_other(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b", models_bytes="50") as (models, disk):
        assert (states(models), disk.loads) == ({"a": "ready", "b": "unloaded"}, ["a"])


@on_a_loop
async def test_a_new_load_is_not_evicted_first(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", "c", "d", models_bytes="300") as (models, _):
        await ask(models, "b")
        await ask(models, "c")
        await models.load("d")  # in the slot of b
        await models.load("b")
        assert states(models) == {"a": "ready", "b": "ready", "c": "unloaded", "d": "ready"}


@on_a_loop
async def test_waiting_requests_precede_eviction(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b", "c", models_bytes="200") as (models, disk):
        await models.unload("b")
        results = await asyncio.gather(ask(models, "b"), ask(models, "c"), return_exceptions=True)
        assert results[0] == 1
        assert isinstance(results[1], ModelsFull)
        assert disk.loads.count("b") == 2


@on_a_loop
async def test_an_oversized_model_evicts_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", "c", models_bytes="300") as (models, disk):
        disk.live["big"] = FakePredictor(size=250)
        for _ in range(2):  # with unknown and with known size
            with pytest.raises(ModelsFull):
                await models.put("d", {"checkpoint": "big"})
            with pytest.raises(ModelsFull):
                await models.load("d")
            assert states(models) == {"a": "ready", "b": "ready", "c": "ready", "d": "unloaded"}


@on_a_loop
async def test_a_busy_model_is_not_unloaded(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b", "c", models_bytes="200") as (models, disk):
        busy = disk.live["b"]
        busy.gate.clear()
        working = asyncio.create_task(ask(models, "b"))
        await busy.wait_until_busy()
        for load in (models.load("c"), models.put("c", None)):
            with pytest.raises(ModelsFull):
                await load
        assert models.results == {"loaded": 3, "failed": 2}
        assert states(models)["b"] == "ready"
        busy.gate.set()
        await working
        await ask(models, "c")
        assert states(models) == {"a": "ready", "b": "unloaded", "c": "ready"}


@on_a_loop
async def test_an_arriving_request_keeps_its_model(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b", "c", models_bytes="200") as (models, _):
        with holding(models.served["b"].current):
            with pytest.raises(ModelsFull):
                await models.load("c")
            assert states(models)["b"] == "ready"


@on_a_loop
async def test_a_slow_eviction_blocks_no_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.models.residency.RETIRE_SECONDS", 0.0)
    async with running(tmp_path, "a", "b", "c", models_bytes="200") as (models, _):
        kept = models.served["b"].current
        kept.grant()
        with ExitStack() as end:
            end.callback(kept.take_back)
            with pytest.raises(ModelsFull):
                await models.load("c")
            assert states(models) == {"a": "ready", "b": "unloaded", "c": "unloaded"}
            await until(
                lambda: sum(models._memory.loaded().values()) <= 200
            )  # c, which did not fit, is unloaded
            assert await models.put("a", {"checkpoint": "a.1"}) is False
            again = asyncio.create_task(ask(models, "b"))
        await again
        with holding(models.served["b"].current):
            unloading = asyncio.create_task(models.unload("b"))
            await until(lambda: states(models)["b"] == "unloaded")
            assert await models.put("a", {"checkpoint": "a.2"}) is False
        await unloading
        await ask(models, "c")
        assert states(models) == {"a": "ready", "b": "unloaded", "c": "ready"}


@on_a_loop
async def test_an_unloaded_model_loads_again(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        version = models.served["b"].current
        with holding(version):
            unloading = asyncio.create_task(models.unload("b"))
            await until(lambda: states(models)["b"] == "unloaded")
            assert (await version.engine.infer(request_for(1), timeout=PATIENCE)).batch_size == 1
            assert not unloading.done()
        await unloading
        assert disk.retired == 1
        assert await ask(models, "b") == 1
        assert disk.loads == ["a", "b", "b"]
        assert models.served["b"].current.number == 1, "it is the same version"


@on_a_loop
async def test_a_version_unloaded_at_once_answers(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        await models.unload("b")
        disk.gate.clear()
        with models.acquire("b") as lease:
            loading = asyncio.create_task(lease.load(models, "caller"))
            await until(models._load_lock.locked)
            unloading = asyncio.create_task(models.unload("b"))
            await asyncio.sleep(0)
            disk.gate.set()
            await loading
            await lease.engine.infer(request_for(1), timeout=PATIENCE)
        await unloading
        assert (states(models)["b"], disk.loads) == ("unloaded", ["a", "b", "b"])


@on_a_loop
async def test_two_unloads_close_one_version(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        await asyncio.gather(models.unload("b"), models.unload("b"))
        assert disk.retired == 1


@on_a_loop
async def test_the_default_model_always_stays(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", model_name="b") as (models, _):
        for change in (models.unload, models.delete):
            with pytest.raises(DefaultModel):
                await change("b")
        await models.delete("a")
        assert states(models) == {"b": "ready"}


@on_a_loop
async def test_a_put_changes_what_is_served(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        disk.broken = {"bad"}
        assert await models.put("new", {"checkpoint": "x.1"})
        assert not await models.put("new", {"checkpoint": "x.2"})
        for name in ("new", "other", "b"):
            with pytest.raises(CheckpointRefused, match="bad: it cannot be read"):
                await models.put(name, {"checkpoint": "bad"})
        assert states(models) == {"a": "ready", "b": "ready", "new": "ready"}
        assert models.served["new"].info is not None
        assert models.served["new"].info.head == "x.2"
        await until(lambda: set(disk.live["x"].heads) == {"x.2"})
        disk.gate.clear()
        loading = asyncio.create_task(models.put("b", {"checkpoint": "y"}))
        await until(models._load_lock.locked)
        with pytest.raises(SwapUnderWay):
            await models.put("new", {"checkpoint": "z"})
        disk.gate.set()
        await loading


@on_a_loop
async def test_a_put_waits_for_the_old_version(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        with holding(models.served["b"].current):
            await models.put("b", {"checkpoint": "x"})
            second = asyncio.create_task(models.put("b", {"checkpoint": "y"}))
            await asyncio.sleep(0.01)
            assert await models.put("new", {"checkpoint": "z"})
            assert not second.done()
            assert "y" not in disk.loads, "there are never three versions of a model in memory"
        assert not await second
        assert models.served["b"].info.head == "y"  # type: ignore[union-attr]


@on_a_loop
@pytest.mark.parametrize("name", ["new", "b"])
async def test_a_reload_keeps_the_put_checkpoint(name: str, tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        await models.put(name, {"checkpoint": "x"})
        await models.unload(name)
        await models.put(name, None)
        assert disk.loads == ["a", "b", "x", "x"]


@on_a_loop
async def test_a_disconnect_ends_no_load(tmp_path: Path) -> None:
    async with running(tmp_path, "a") as (models, disk):
        disk.gate.clear()
        caller = asyncio.create_task(models.put("new", {"checkpoint": "x"}))
        await until(models._load_lock.locked)
        caller.cancel()
        await asyncio.wait((caller,))
        disk.gate.set()
        await until(lambda: states(models) == {"a": "ready", "new": "ready"})


@on_a_loop
async def test_a_reread_folder_is_the_truth_again(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", "c", "d") as (models, disk):
        await models.put("b", {"checkpoint": "x"})
        await models.put("new", {"checkpoint": "y"})
        await models.delete("d")
        shutil.rmtree(tmp_path / "c")
        entry(tmp_path / "e")
        (tmp_path / "a" / "config.json").write_text("{ }")
        loads = len(disk.loads)
        models.reload()
        await until(lambda: models._reloading is not None and models._reloading.done())
        await until(lambda: all(task.done() for task in models._loads.values()))
        assert states(models) == dict.fromkeys(("a", "b", "d", "e", "new"), "ready")
        assert sorted(disk.loads[loads:]) == ["a", "b", "d", "e"]
        loads = len(disk.loads)
        models.reload()
        await until(lambda: models._reloading is not None and models._reloading.done())
        assert [name for name in disk.loads[loads:] if name == "a"] == []


@on_a_loop
async def test_a_deletion_beats_the_next_version(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as (models, _):
        before = models.served["b"]
        with holding(before.current):

            async def agree() -> None:
                await models.delete("b")

            await models.replace("b", {"checkpoint": "x"}, agree=agree)
        assert states(models) == {"a": "ready"}
        assert models.overrides["b"].is_deleted
        await until(lambda: not before.versions.open)


@on_a_loop
async def test_a_deletion_before_a_load_leaks_none(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", "c", models_bytes="200") as (models, disk):
        await ask(models, "c")
        before = models.served["b"]
        evicted = models.served["c"].current
        evicted.grant()  # so that the load waits for the memory of `c`
        putting = asyncio.create_task(models.put("b", {"checkpoint": "x"}))
        await until(lambda: states(models)["c"] == "unloaded")
        await models.delete("b")
        await until(lambda: not before.versions.open)
        evicted.take_back()
        await putting
        assert disk.loads[-1] == "x"
        assert not before.versions.open


@on_a_loop
async def test_deletion_answers_admitted_requests(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        before = models.served["b"].current
        with holding(before):
            await models.put("b", {"checkpoint": "x"})
            await models.delete("b")
            await asyncio.sleep(0.01)
            assert (await before.engine.infer(request_for(1), timeout=PATIENCE)).batch_size == 1
        await until(lambda: disk.retired == 2)


@on_a_loop
async def test_a_broken_entry_changes_no_model(tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b", "c") as (models, _):
        await models.put("c", {"checkpoint": "x"})
        before = [models.served[name].current for name in ("b", "c")]
        (tmp_path / "b.toml").write_text('labels = "nothing')
        (tmp_path / "c.pth").touch()
        for _ in range(2):
            models.reload()
            await until(lambda: models._reloading is not None and models._reloading.done())
        assert [models.served[name].current for name in ("b", "c")] == before
        (tmp_path / "c.pth").unlink()
        models.reload()
        await until(lambda: models._reloading is not None and models._reloading.done())
        assert models.served["c"].current.checkpoint is None, (
            "what is in order again is the truth again"
        )


@on_a_loop
async def test_waiting_requests_share_one_load(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        await models.unload("b")
        disk.gate.clear()
        waiting = [asyncio.create_task(ask(models, "b")) for _ in range(5)]
        await asyncio.sleep(0)
        assert await ask(models, "a") == 1
        disk.gate.set()
        await asyncio.gather(*waiting)
        assert disk.loads == ["a", "b", "b"]


@on_a_loop
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("change", ["delete", "put"])
async def test_an_admitted_request_gets_its_model(waits: bool, change: str, tmp_path: Path) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        await models.unload("b")
        disk.gate.clear()
        version = models.served["b"].current
        with nullcontext() if waits else holding(version):
            asking = asyncio.create_task(ask(models, "b") if waits else asyncio.sleep(0))
            await until(lambda: not waits or models._load_lock.locked())
            put = partial(
                models.replace, "b", "x", waits=waits
            )  # otherwise it is refused while another load runs
            changing = asyncio.create_task(models.delete("b") if change == "delete" else put())
            await asyncio.sleep(0)
            disk.gate.set()
            if not waits:
                await until(
                    lambda: models.served.get("b") is None or models.served["b"].current.number == 2
                )
                assert (
                    await version.engine.infer(request_for(1), timeout=PATIENCE)
                ).batch_size == 1
            await asking
        await changing
        assert disk.loads == ["a", "b", "b", *(["x"] if change == "put" else [])]
        assert states(models) == {"a": "ready", **({"b": "ready"} if change == "put" else {})}


@on_a_loop
async def test_a_request_waits_for_a_replacement(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b") as (models, disk):
        disk.broken = {"bad"}
        await models.unload("b")
        for checkpoint, loads in (("bad", ["bad", "b"]), ("x", ["x"])):
            disk.loads.clear()
            disk.gate.clear()
            changing = asyncio.create_task(models.put("b", {"checkpoint": checkpoint}))
            await until(lambda: states(models)["b"] == "loading")
            asking = asyncio.create_task(ask(models, "b"))
            disk.gate.set()
            await asyncio.wait([changing])
            assert (await asking, disk.loads) == (1, loads)
            await models.unload("b")


@on_a_loop
async def test_the_default_keeps_a_unique_name(tmp_path: Path) -> None:
    async with running(tmp_path, checkpoint="a") as (models, disk):
        await models.put("p", {"checkpoint": "x"})
        with pytest.raises(NameTaken):
            await models.put("a", "p")
        assert states(models) == {"a": "ready", "p": "ready"}
        await until(lambda: set(disk.live["a"].heads) == {"a"})
        assert not await models.put("a", "b")
        assert states(models) == {"b": "ready", "p": "ready"}


@on_a_loop
async def test_crowded_models_spare_the_default(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, "a", "b", "c", models_bytes="200") as (models, disk):

        async def alternate(*names: str) -> None:
            while models.results["evicted"] < 10:
                for name in names:
                    with suppress(ModelsFull):  # the other model is in use
                        await ask(models, name)

        attacks = [asyncio.create_task(alternate(*names)) for names in ("bc", "cb")]
        while not all(each.done() for each in attacks):
            assert await ask(models, "a") == 1
            assert backbones(models)["a"]
        await asyncio.gather(*attacks)
        assert disk.loads.count("a") == 1
