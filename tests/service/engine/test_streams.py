"""Several batches at the same time, out of one queue."""

from __future__ import annotations

import asyncio
import threading

import pytest

from model.outputs import RequestedOutputs
from service.engine.messages import InferenceRequest
from service.engine.streams import Streams
from service.errors import EngineUnavailable
from tests.launcher import until
from tests.service.fakes import BAD, PATIENCE, FakePredictor, expected_indices, on_a_loop, pixels, running


@on_a_loop
async def test_each_stream_takes_the_next_batch_while_others_compute() -> None:
    async with running(FakePredictor(streams=2, max_batch=3)) as rig:
        tasks = [await rig.keep_busy(0)]
        tasks.append(rig.ask_soon(1))
        await rig.predictor.wait_until_busy()
        for red in range(2, 5):  # both are busy: these wait
            tasks.append(rig.ask_soon(red))
            await rig.until_queued(red - 1)
        assert rig.predictor.launched == [[0], [1]]
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("engine")]
        assert len(threads) >= 2
        assert all(thread.daemon for thread in threads)  # one that hangs does not keep the process alive
        rig.predictor.gate.set()
        results = await asyncio.gather(*tasks)
    assert rig.predictor.launched == [[0], [1], [2, 3, 4]]
    assert [result.outputs.indices.tolist() for result in results] == [expected_indices(red, 3) for red in range(5)]


@on_a_loop
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_defect_in_any_stream_ends_them_all_and_leaves_nobody_waiting() -> None:
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


def test_the_oldest_batch_under_way_is_timed_by_looks_until_it_ends() -> None:
    streams = Streams(queue_size=9, max_delay=0, deliver=lambda *_: None, clock=lambda: 50.0)
    predictor = FakePredictor(streams=2)
    predictor.gate.clear()
    thread = threading.Thread(target=streams.run, args=(predictor,))
    thread.start()
    assert streams.look(10) == 0
    for red, longest in ((1, 10), (2, 20)):
        streams.put(InferenceRequest(pixels(red), RequestedOutputs(3)), timeout=3600)
        assert predictor.entered.acquire(timeout=PATIENCE)
        assert streams.look(10) == longest
    predictor.gate.set()
    until(lambda: streams.look(0) == 0)
    streams.stop()
    thread.join(PATIENCE)
