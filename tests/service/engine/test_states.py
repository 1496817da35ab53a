"""The states of an engine: loading, ready, failed and closed; listeners, and a lost device."""

import asyncio
import gc
import weakref
from typing import Any, cast

import pytest

from model.errors import CheckpointError, DeviceError, NewProcessNeeded
from model.runtime.predictor import Predictor
from service.engine.engine import LocalEngine
from service.engine.messages import ModelInfo
from service.errors import EngineUnavailable
from service.models.local_model import LocalModel
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.small_models import make_checkpoint
from tests.service.engine.conftest import Running
from tests.service.fakes import (
    PATIENCE,
    FakePredictor,
    expected_indices,
    model_info,
    on_a_loop,
    start,
    until,
)


@on_a_loop
async def test_a_dead_device_ends_the_engine(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as rig:
        tasks = [await rig.keep_busy(0), *(rig.ask_soon(red) for red in range(1, 10))]
        await rig.until_queued(9)
        rig.predictor.device_is_dead = True
        rig.predictor.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineUnavailable] * 10
        await rig.until_state("failed")
        assert rig.engine.status.reason.startswith("the device failed: cpu")
        with pytest.raises(EngineUnavailable, match="the device failed"):
            await rig.ask(11)
    assert [each for each in rig.states if each != "loading"] == ["ready", "failed"]
    assert any(line.startswith("engine cpu: the device failed: cpu") for line in caplog.messages)


@on_a_loop
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CheckpointError("weights.bin: no such file"), "weights.bin: no such file"),
        (KeyError("weights.bin"), "KeyError: 'weights.bin'"),
    ],
)
async def test_a_failed_load_has_its_reason(
    error: Exception, reason: str, running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> tuple[FakePredictor, ModelInfo]:
        raise error

    async with running(load=load, ready=False) as rig:
        await rig.until_state("failed")
        assert rig.engine.status.reason == reason
        assert rig.engine.info is None
        with pytest.raises(EngineUnavailable, match=r"weights\.bin"):
            await rig.ask(1)
    assert rig.states[-1] == "failed" and "ready" not in rig.states
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("CRITICAL", f"cannot start: {reason}")
    ]


@on_a_loop
async def test_a_failed_load_frees_the_model(
    running: Running,
) -> None:
    models: list[weakref.ref[FakePredictor]] = []

    def read() -> None:
        model = FakePredictor()
        models.append(weakref.ref(model))
        raise CheckpointError("no")

    def load() -> tuple[FakePredictor, ModelInfo]:
        model = FakePredictor()
        models.append(weakref.ref(model))
        try:
            read()
        except CheckpointError as error:
            raise DeviceError("neither") from error
        return model, model_info()

    gc.disable()
    try:
        async with running(load=load, ready=False) as rig:
            await rig.until_state("failed")
            assert [model() for model in models] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("device", "line"),
    [
        ("auto", "cannot start: no"),
        ("cpu", "cannot start: no"),
        ("cuda:1", "cannot start on cuda:1: no"),
    ],
)
@on_a_loop
async def test_a_failed_load_names_its_device(
    device: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> tuple[FakePredictor, ModelInfo]:
        raise CheckpointError("no")

    engine = LocalEngine(
        load, device=device, queue_size=1, max_delay=0, on_batch=lambda report: None
    )
    model = LocalModel(lambda _: cast(Any, engine))
    failed = asyncio.Event()
    start(model, failed.set)
    await failed.wait()
    await model.versions.close_all()
    assert [record.message for record in caplog.records] == [line]


@on_a_loop
async def test_a_compiling_engine_says_so(running: Running) -> None:
    class Compiling(FakePredictor):
        def warm_up(self, *, compile_later: bool = False) -> None:
            self.compiled = "compiling"
            assert self.gate.wait(PATIENCE)
            self.compiled = "compiled"

    predictor = Compiling()
    predictor.gate.clear()
    async with running(predictor, ready=False) as rig:
        await until(lambda: "the model is being compiled" in rig.engine.status.reason)
        assert rig.engine.status.state == "loading"
        predictor.gate.set()
        await rig.until_state("ready")
        assert rig.engine.status.reason == ""


@on_a_loop
async def test_closing_finishes_the_running_batch(running: Running) -> None:
    async with running() as rig:
        launched = await rig.keep_busy(0)
        waits = rig.ask_soon(1)
        await rig.until_queued(1)
        closing = asyncio.create_task(rig.close())
        await asyncio.sleep(0.02)
        rig.predictor.gate.set()
        await closing
        assert (await launched).outputs.indices.tolist() == expected_indices(0, 3)
        with pytest.raises(EngineUnavailable):
            await waits
        with pytest.raises(EngineUnavailable):
            await rig.ask(2)
    assert rig.predictor.launched == [[0]]
    assert [each for each in rig.states if each != "loading"] == ["ready", "closed"]


@on_a_loop
async def test_an_endless_batch_fails_the_engine(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(batch_seconds=0.02) as rig:
        tasks = [await rig.keep_busy(0), rig.ask_soon(1)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineUnavailable] * 2
        await rig.until_state("failed")
        reason = "a batch computed for more than 0.02 s: the device hangs"
        assert rig.engine.status.reason == reason
        with pytest.raises(EngineUnavailable, match="hangs"):
            await rig.ask(2)
        await rig.close()  # although the thread is still in the batch
        rig.predictor.gate.set()
    assert [each for each in rig.states if each != "loading"][:2] == ["ready", "failed"]
    assert [record.levelname for record in caplog.records if reason in record.message] == [
        "CRITICAL"
    ]


@on_a_loop
async def test_a_batch_that_takes_long_is_told_of(running: Running) -> None:
    async with running(batch_seconds=1.0) as rig:
        task = await rig.keep_busy(0)
        await until(lambda: rig.engine.status.reason != "")
        assert rig.engine.status.reason.endswith("the device may hang")
        rig.predictor.gate.set()
        await task
        await until(lambda: rig.engine.status.reason == "")
        assert rig.engine.ready


@on_a_loop
async def test_an_ended_engine_tells_its_remedy() -> None:
    ops = StandInOps()
    ops.fail_capture = RuntimeError("a kernel cannot be captured")
    predictor = Predictor(
        make_checkpoint(), device="cpu", dtype="float32", max_batch=2, streams=2, ops=ops
    )
    engine = LocalEngine(
        lambda: (predictor, model_info()),
        device="cuda",
        queue_size=8,
        max_delay=0,
        on_batch=lambda _: None,
    )
    changed = asyncio.Event()
    engine.start(changed.set)
    await changed.wait()
    assert engine.status.state == "failed"
    failure = engine.failure
    assert isinstance(failure, NewProcessNeeded)
    assert (failure.option, failure.value) == ("compile", "no-graphs")
    await engine.close()
