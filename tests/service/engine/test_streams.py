"""A launch and the outcomes of its images; several batches at once from one queue."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from model.errors import CheckpointChanged, NewProcessNeeded
from model.outputs import MapRequest, Outputs, RequestedOutputs
from service.engine.batching import QueuedItem
from service.engine.messages import InferenceRequest, InferenceResult
from service.engine.streams import Streams, launch
from service.errors import EngineUnavailable, InferenceFailed
from tests.launcher import until
from tests.service.fakes import (
    BAD,
    PATIENCE,
    FakePredictor,
    expected_indices,
    on_a_loop,
    pixels,
    request_for,
    running,
)


@on_a_loop
async def test_each_free_stream_takes_a_batch() -> None:
    async with running(FakePredictor(streams=2, max_batch=3)) as rig:
        tasks = [await rig.keep_busy(0)]
        tasks.append(rig.ask_soon(1))
        await rig.predictor.wait_until_busy()
        for red in range(2, 5):  # both streams are busy: these wait
            tasks.append(rig.ask_soon(red))
            await rig.until_queued(red - 1)
        assert rig.predictor.launched == [[0], [1]]
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("engine")]
        assert len(threads) >= 2
        assert all(
            thread.daemon for thread in threads
        )  # a hanging stream does not keep the process alive
        rig.predictor.gate.set()
        results = await asyncio.gather(*tasks)
    assert rig.predictor.launched == [[0], [1], [2, 3, 4]]
    assert [result.outputs.indices.tolist() for result in results] == [
        expected_indices(red, 3) for red in range(5)
    ]


@on_a_loop
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_defect_in_a_stream_ends_them_all() -> None:
    async with running(FakePredictor(streams=2, error=ZeroDivisionError)) as rig:
        tasks = [await rig.keep_busy(BAD)]
        tasks.append(rig.ask_soon(BAD))
        await rig.predictor.wait_until_busy()
        tasks.append(rig.ask_soon(3))
        await rig.until_queued(1)
        rig.predictor.gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        await rig.until_state("failed")
    assert all(isinstance(outcome, EngineUnavailable) for outcome in outcomes)


class NotedCondition(threading.Condition):
    """A condition that says when a thread is about to wait for its predicate, under the lock."""

    def __init__(self, lock: Any) -> None:
        super().__init__(lock)
        self.entered = threading.Event()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        self.entered.set()
        return super().wait_for(predicate, timeout)


def test_a_stop_ends_waiting_maps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.engine.streams.MAX_EXPLANATION_WAIT", PATIENCE)
    predictor = FakePredictor()
    streams = Streams(queue_size=10, max_delay=0, deliver=lambda *_: None, clock=lambda: 0.0)
    wake = NotedCondition(streams._lock)
    streams._maps = streams._maps._replace(wake=wake)
    predictor.gate.clear()
    engine = threading.Thread(target=streams.run, args=(predictor,), daemon=True)
    engine.start()
    streams.put(request_for(0), PATIENCE)
    assert predictor.entered.acquire(timeout=PATIENCE)
    streams.put(request_for(1), PATIENCE)
    waiting_map = streams.put(request_for(2, map=MapRequest("gae", 3)), PATIENCE)
    assert wake.entered.wait(PATIENCE)
    streams.cancel(waiting_map)  # its client has gone
    streams.stop()
    predictor.gate.set()
    engine.join(PATIENCE / 3)
    assert not engine.is_alive()


@on_a_loop
async def test_a_late_failure_ends_the_engine() -> None:
    late = NewProcessNeeded("cuda:0: the capture failed", "compile", "no-graphs")
    async with running(FakePredictor(late_failure=late), ready=False) as rig:
        await rig.until_state("failed")
        with pytest.raises(EngineUnavailable, match="the capture failed"):
            await rig.ask(1)


def test_the_oldest_running_batch_is_timed() -> None:
    streams = Streams(queue_size=9, max_delay=0, deliver=lambda *_: None, clock=lambda: 50.0)
    predictor = FakePredictor(streams=2)
    predictor.gate.clear()
    thread = threading.Thread(target=streams.run, args=(predictor,))
    thread.start()
    assert streams.age_batches(10) == 0
    for red, longest in ((1, 10), (2, 20)):
        streams.put(InferenceRequest(pixels(red), RequestedOutputs(3)), timeout=3600)
        assert predictor.entered.acquire(timeout=PATIENCE)
        assert streams.age_batches(10) == longest
    predictor.gate.set()
    until(lambda: streams.age_batches(0) == 0)
    streams.stop()
    thread.join(PATIENCE)


def entries(*reds: int) -> list[QueuedItem[InferenceRequest]]:
    return [
        QueuedItem(request_for(red), arrived=90.0 + row, deadline=200.0)
        for row, red in enumerate(reds)
    ]


def ticking() -> Callable[[], float]:
    """A clock from 100 that advances one second per look."""
    return map(float, count(100)).__next__


@pytest.mark.parametrize("error", [RuntimeError, ValueError, MemoryError])
def test_every_failed_image_is_logged(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    predictor = FakePredictor(error=error)
    outcomes, report = launch(predictor, entries(1, BAD, 3), "full", ticking())
    assert predictor.launched == [[1, BAD, 3], [1], [BAD], [3]]
    assert [type(outcome) for outcome in outcomes] == [
        InferenceResult,
        InferenceFailed,
        InferenceResult,
    ]
    assert report.size == 3
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.WARNING, "a batch of 3 failed, trying its images one by one: it does not compute"),
        (logging.ERROR, "an image failed alone: it does not compute"),
    ]


def test_changed_files_are_told_to_callers() -> None:
    outcomes, _ = launch(FakePredictor(error=CheckpointChanged), entries(1, BAD), "idle", ticking())
    assert [str(outcome) for outcome in outcomes[1:]] == [
        "this output needs the checkpoint's files, which changed since they were loaded"
    ]


def test_a_lost_device_stops_at_once() -> None:
    predictor = FakePredictor(device="cuda:3", device_is_dead=True)
    with pytest.raises(
        EngineUnavailable, match="the device failed: cuda:3: the model does not run"
    ):
        launch(predictor, entries(1, 2, 3), "idle", ticking())
    assert predictor.launched == [[1, 2, 3]], "no image is tried alone"


class Fragile(FakePredictor):
    """A predictor that loses its device to an image that fails alone."""

    def predict(
        self, images: Sequence[NDArray[np.uint8]], requests: Sequence[RequestedOutputs]
    ) -> list[Outputs]:
        self.device_is_dead = len(images) == 1 and int(images[0][0, 0, 0]) == BAD
        return super().predict(images, requests)


def test_no_image_follows_a_lost_device() -> None:
    predictor = Fragile()
    with pytest.raises(EngineUnavailable, match="the device failed"):
        launch(predictor, entries(1, BAD, 3), "idle", ticking())
    assert predictor.launched == [[1, BAD, 3], [1], [BAD]]


def test_times_are_counted_from_the_launch() -> None:
    predictor = FakePredictor(batch_sizes=(1, 4), device="cuda:3")
    outcomes, report = launch(predictor, entries(1, 2, 3), "delay", ticking())
    results = [outcome for outcome in outcomes if isinstance(outcome, InferenceResult)]
    assert [result.queue_seconds for result in results] == [10.0, 9.0, 8.0]
    assert [result.inference_seconds for result in results] == [1.0, 1.0, 1.0]
    assert [result.batch_size for result in results] == [3, 3, 3]
    assert [result.outputs.indices.tolist() for result in results] == [
        expected_indices(red, 3) for red in (1, 2, 3)
    ]
    assert (report.device, report.size, report.padding, report.release) == ("cuda:3", 3, 1, "delay")
