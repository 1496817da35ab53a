"""What an engine's process does from its start to its end, in this process and without a model."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest

from model.errors import CheckpointError, NewProcessNeeded
from model.outputs import RequestedOutputs
from service.cluster.channel import EngineChannel
from service.cluster.engine_process import STOP, _loop_factory, _serve, run_engine
from service.cluster.remote_engine import RemoteEngine
from service.cluster.shared_memory import SharedCounters
from service.cluster.supervisor import TRY_AGAIN
from service.engine.messages import InferenceRequest, ModelInfo
from service.observe.metrics import Metrics
from service.settings import Settings, load_settings
from tests.service.cluster.engines import until
from tests.service.fakes import PATIENCE, FakePredictor, expected_indices, model_info, on_a_loop, pixels


@pytest.fixture
def settings() -> Settings:
    return load_settings({"workers": 2, "queue_size": 4, "batch_timeout": 20})


@pytest.fixture
def channel() -> Iterator[EngineChannel]:
    """The channel of the second of two engines."""
    with (
        closing(SharedCounters(workers=2, engines=2, capacity=4)) as counters,
        closing(EngineChannel(1, "cuda:1", counters, slots=8)) as channel,
    ):
        yield channel


@on_a_loop
async def test_an_engine_serves_the_workers_until_it_is_told_to_stop(
    settings: Settings, channel: EngineChannel
) -> None:
    predictor, metrics, counters = FakePredictor(), Metrics(), channel.counters
    loaded: list[Settings] = []

    def load(given: Settings) -> tuple[FakePredictor, ModelInfo]:
        loaded.append(given)
        return predictor, model_info()

    engine = asyncio.create_task(_serve(settings, channel, load, metrics))
    remote = RemoteEngine(channel, 1, retry_seconds=0.001)  # the second of two workers
    remote.start(lambda: None)
    await until(lambda: remote.ready)
    assert counters.engine_ready.tolist() == [0, 1]
    assert loaded == [settings]
    predictor.gate.clear()
    tasks = [asyncio.create_task(remote.infer(InferenceRequest(pixels(1), RequestedOutputs(3)), timeout=PATIENCE))]
    await predictor.wait_until_busy()
    tasks.append(asyncio.create_task(remote.infer(InferenceRequest(pixels(2), RequestedOutputs(3)), timeout=PATIENCE)))
    await until(lambda: counters.queue_depth.tolist() == [0, 1])
    predictor.gate.set()
    assert [(await task).outputs.indices.tolist() for task in tasks] == [expected_indices(red, 3) for red in (1, 2)]
    assert counters.engine_beats[0] == 0
    assert counters.engine_beats[1] >= 1
    assert not engine.done()

    os.kill(os.getpid(), STOP)
    assert await engine == 0
    await until(lambda: remote.status.state == "closed")
    await remote.close()
    for _ in range(3):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}  # it neither beats nor publishes any more
    with pytest.raises(OSError):
        channel.connect()
    assert b'vit_batches_total{device="cpu",release="idle"} 2.0' in metrics.render()


@on_a_loop
async def test_a_delay_of_the_settings_is_in_milliseconds(channel: EngineChannel) -> None:
    settings, predictor = load_settings({"max_delay_ms": 1, "workers": 1}), FakePredictor(max_batch=2)
    metrics = Metrics()
    engine = asyncio.create_task(_serve(settings, channel, lambda _: (predictor, model_info()), metrics))
    remote = RemoteEngine(channel, 0, retry_seconds=0.001)
    remote.start(lambda: None)
    await until(lambda: remote.ready)
    await remote.infer(InferenceRequest(pixels(1), RequestedOutputs(3)), timeout=10)
    assert b'vit_batches_total{device="cpu",release="delay"} 1.0' in metrics.render()
    await remote.close()
    os.kill(os.getpid(), STOP)
    assert await engine == 0


def test_an_engine_that_fails_ends_its_process_with_one(settings: Settings, channel: EngineChannel) -> None:
    """The supervisor ends it: what a terminal or a container sends to all processes does not."""
    terminating = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in terminating}
    heard: list[object] = []

    def load(_: Settings) -> tuple[FakePredictor, ModelInfo]:
        heard.extend(signal.getsignal(number) for number in terminating)
        raise CheckpointError("weights.bin: no such file")

    try:
        assert run_engine(settings, channel, load, Metrics()) == 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert heard == [signal.SIG_IGN] * 3
    assert channel.counters.engine_ready.tolist() == [0, 0]


@on_a_loop
async def test_an_engine_that_does_not_load_in_time_says_so_and_ends(
    settings: Settings, channel: EngineChannel, caplog: pytest.LogCaptureFixture
) -> None:
    never = threading.Event()

    def load(_: Settings) -> tuple[FakePredictor, ModelInfo]:
        never.wait(PATIENCE)
        raise CheckpointError("the disk does not answer")

    try:
        assert await _serve(settings, channel, load, Metrics(), load_timeout=0.01) == 1
    finally:
        never.set()
    assert channel.failure.read() == "the checkpoint was not loaded and warm within 0.01 s (VIT_LOAD_TIMEOUT)"
    assert caplog.messages == []  # the supervisor says so


@on_a_loop
async def test_an_engine_that_needs_another_option_says_so_to_its_successor_once(
    settings: Settings, channel: EngineChannel, caplog: pytest.LogCaptureFixture
) -> None:
    def load(_: Settings) -> tuple[FakePredictor, ModelInfo]:
        raise NewProcessNeeded("cuda:1: not enough memory for batches of 64", "max_batch", 32)

    assert await _serve(settings, channel, load, Metrics()) == TRY_AGAIN
    assert "engine cuda:1: starting again with max_batch=32" in caplog.text
    assert channel.changed_options() == {"max_batch": 32}


def test_an_option_that_did_not_help_is_not_tried_again(channel: EngineChannel) -> None:
    assert channel.changed_options() == {}
    assert channel.change_option("compile", "no-graphs")
    assert not channel.change_option("compile", "no-graphs")
    assert channel.change_option("max_batch", 32)
    assert channel.change_option("max_batch", 16)
    assert channel.changed_options() == {"compile": "no-graphs", "max_batch": 16}


def test_the_event_loop_is_uvloops_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", SimpleNamespace(new_event_loop=asyncio.SelectorEventLoop))
    assert _loop_factory() is asyncio.SelectorEventLoop
    monkeypatch.setitem(sys.modules, "uvloop", None)  # importing it fails
    assert _loop_factory() is None
