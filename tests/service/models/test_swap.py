"""Swap a model: which version answers a request, failed loads, and closing the previous one."""

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from model.errors import CheckpointError
from service.engine.backbones import Checkpoint
from service.engine.engine import LocalEngine
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import CheckpointRefused, SwapUnderWay
from service.models.local_model import LocalModel
from service.models.local_models import LocalModels
from service.models.version import Version
from service.settings import load_settings
from tests.service.fakes import (
    PATIENCE,
    FakePredictor,
    holding,
    model_info,
    on_a_loop,
    request_for,
)


class Models:
    """Checkpoints by name, each with a predictor; loads wait for `gate`, `broken` names fail."""

    all: LocalModels

    def __init__(self) -> None:
        self.predictors: dict[str, FakePredictor] = {}
        self.engines: list[LocalEngine] = []
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.retired = 0
        self.changes: list[str] = []
        self.now = 100.0

    def make(self, checkpoint: Checkpoint) -> Any:
        name = str(checkpoint or "configured")

        def load() -> tuple[FakePredictor, ModelInfo]:
            assert self.gate.wait(PATIENCE)
            if name in self.broken:
                raise CheckpointError(f"{name}: no such file")
            self.predictors[name] = FakePredictor()
            return self.predictors[name], model_info(name=name)

        engine = LocalEngine(
            load,
            device="cpu",
            queue_size=100,
            max_delay=0,
            on_batch=lambda _: None,
            clock=lambda: self.now,
        )
        self.engines.append(engine)
        return engine

    def retire(self) -> None:
        self.retired += 1

    @property
    def open_engines(self) -> int:
        return sum(engine.status.state in ("loading", "ready") for engine in self.engines)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[LocalModel, Models]]:
    models = Models()
    models.all = LocalModels(
        load_settings(), lambda own: models.make(own.get("checkpoint")), on_retired=models.retire
    )
    swap = models.all.served[""]
    models.all.start(
        lambda: models.changes.append(
            swap.current.engine.info.name
            if swap.current.engine.info
            else swap.current.engine.status.reason
        ),
    )
    await until(lambda: swap.current.engine.ready)
    try:
        yield swap, models
    finally:
        models.gate.set()
        for predictor in models.predictors.values():
            predictor.gate.set()
        await models.all.close()
        assert models.open_engines == 0


async def load(models: Models, checkpoint: str | None) -> None:
    await models.all.put("", checkpoint)


def ask(
    version: Version[Any], red: int, timeout: float = PATIENCE
) -> asyncio.Task[InferenceResult]:
    return asyncio.create_task(version.engine.infer(request_for(red), timeout=timeout))


@on_a_loop
async def test_each_request_keeps_its_version() -> None:
    async with running() as (swap, models):
        old = swap.current
        before = models.predictors["configured"]
        with holding(old):
            before.gate.clear()
            launched = ask(old, 1)
            await before.wait_until_busy()
            waiting = ask(old, 2)
            await load(models, "next")
            after = models.predictors["next"]
            assert (swap.current.engine.info and swap.current.engine.info.name, after.warm_ups) == (
                "next",
                1,
            )
            prepared = ask(old, 3)  # decoded for the previous model during the swap
            assert (await ask(swap.current, 4)).batch_size == 1
            before.gate.set()
            assert [(await task).batch_size for task in (launched, waiting, prepared)] == [1, 2, 2]
            assert models.retired == 0
        await until(lambda: models.retired == 1)
        assert (before.launched, after.launched) == ([[1], [2, 3]], [[4]])
        assert models.engines[0].status.state == "closed"
        assert models.changes == ["configured", "next"]


@on_a_loop
async def test_the_old_model_is_freed_at_once() -> None:
    async with running() as (swap, models):
        old = weakref.ref(models.predictors.pop("configured"))
        gc.disable()
        try:
            await load(models, "next")
            await until(lambda: models.retired == 1)
            assert old() is None
            assert swap.versions.open == {swap.current}
        finally:
            gc.enable()


@on_a_loop
async def test_a_bad_checkpoint_keeps_the_old_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as (swap, models):
        models.broken = {"bad"}
        with pytest.raises(CheckpointRefused, match="bad: no such file"):
            await load(models, "bad")
        assert swap.versions.open == {swap.current}
        assert (await ask(swap.current, 1)).batch_size == 1
        assert models.predictors["configured"].launched == [[1]]
        refusal = "the next checkpoint is refused, and the old one stays: bad: no such file"
        assert [record[1:] for record in caplog.record_tuples] == [(logging.ERROR, refusal)]
        assert (models.changes, models.all.results) == (
            ["configured"],
            {"loaded": 1, "failed": 1, "refused": 1},
        )
        assert list(models.all.reloads().values()) == [False]
        await load(models, "good")
        assert models.all.results == {"loaded": 2, "failed": 1, "refused": 1, "served": 1}
        assert list(models.all.reloads().values()) == [True]
        assert swap.current.engine.info is not None
        assert swap.current.engine.info.name == "good"


@on_a_loop
async def test_a_late_checkpoint_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("service.models.swap.LOAD_SECONDS", 0.05)
    async with running() as (swap, models):
        models.gate.clear()
        with pytest.raises(CheckpointRefused, match=r"^it was not loaded and warm within 0.05 s"):
            await load(models, "hangs")
        assert (await ask(swap.current, 1)).batch_size == 1
        assert swap.versions.open == {swap.current}
        models.gate.set()
        hung = models.engines[-1]
        await until(
            lambda: "hangs" in models.predictors
        )  # it loads after all, and is closed without a warm-up
        monkeypatch.undo()
        await load(models, "next")
        assert (models.predictors["hangs"].warm_ups, hung.status.state) == (0, "closed")
        assert swap.current.engine.info is not None
        assert swap.current.engine.info.name == "next"


@on_a_loop
async def test_a_concurrent_load_is_refused() -> None:
    async with running() as (_, models):
        models.gate.clear()
        first = asyncio.create_task(load(models, "first"))
        await until(lambda: len(models.engines) == 2)
        with pytest.raises(SwapUnderWay, match="another checkpoint is being loaded"):
            await load(models, "second")
        models.gate.set()
        await first


@on_a_loop
async def test_a_load_waits_for_the_old_model() -> None:
    async with running() as (swap, models):
        with holding(swap.current):
            await load(models, "second")
            third = asyncio.create_task(load(models, "third"))
            for _ in range(50):
                await asyncio.sleep(0)
            assert models.open_engines == 2
        await third
        assert models.engines[0].status.state == "closed"


@on_a_loop
async def test_a_reload_reads_the_configured_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    async with running() as (_, models):
        await load(models, "other")
        await until(lambda: models.retired == 1)
        await load(models, None)
        await until(lambda: models.retired == 2)
        assert models.changes == ["configured", "other", "configured"]
    beside = "beside the model that is served"
    closed = "the old model is closed"
    lines = [line for line in caplog.messages if line.startswith(("loading", "the old"))]
    assert lines == [
        f"loading other {beside}",
        closed,
        f"loading the configured checkpoint {beside}",
        closed,
    ]


@on_a_loop
async def test_an_end_closes_both_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as (swap, models):
        models.gate.clear()
        loading = asyncio.create_task(load(models, None))
        await until(lambda: len(models.engines) == 2)
        loading.cancel()
        closing = asyncio.create_task(models.all.close())
        await asyncio.sleep(0)
        models.gate.set()
        await closing
        assert swap.current.engine is cast(object, models.engines[0])
        assert "refused" not in caplog.text
