"""What only engines in other processes have to get right: several workers, lost connections, slots."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest

from model.outputs import MapRequest, RequestedOutputs
from service.cluster.engine_server import EngineServer
from service.cluster.protocol import Cancel, Failed, Frame, ModelLoaded, StatusChanged, encode
from service.cluster.remote_engine import RemoteEngine
from service.engine.local import LocalEngine
from service.engine.messages import EngineStatus, InferenceRequest
from service.errors import EngineUnavailable, InferenceFailed, QueueFull, ServiceError
from tests.service.cluster.engines import ask, service, until
from tests.service.fakes import PATIENCE, FakePredictor, expected_indices, model_info, on_a_loop, pixels
from tests.service.web.fake_engine import FakeEngine


def reds(predictor: FakePredictor) -> list[int]:
    return sorted(red for batch in predictor.launched for red in batch)


@on_a_loop
async def test_images_of_several_workers_share_batches_and_each_worker_gets_its_own_answers() -> None:
    async with service(slots=100) as running:
        predictor = await running.start_engine()
        one, two = await running.ready_worker(0), await running.ready_worker(1)
        predictor.gate.clear()
        tasks = {red: ask(one if red % 2 else two, red) for red in range(60)}
        await until(lambda: int(running.counters.queue_depth[0]) >= 56)
        predictor.gate.set()
        for red, task in tasks.items():
            assert (await task).outputs.indices.tolist() == expected_indices(red, 3)
    assert reds(predictor) == list(range(60))
    assert any(len({red % 2 for red in batch}) == 2 for batch in predictor.launched)


@on_a_loop
async def test_the_answers_of_a_batch_wake_a_worker_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(slots=20) as running:
        predictor = await running.start_engine()
        worker = await running.ready_worker()
        predictor.gate.clear()
        tasks = [ask(worker, 0)]
        await predictor.wait_until_busy()
        tasks += [ask(worker, red, map=MapRequest.row(2)) for red in range(1, 9)]
        await until(lambda: running.counters.queue_depth[0] == 8)
        connection = worker._connection
        assert connection is not None
        wake_ups = []
        original = connection._reader.feed

        def feed(data: bytes) -> Iterator[Frame]:
            wake_ups.append(len(data))
            return original(data)

        monkeypatch.setattr(connection._reader, "feed", feed)
        predictor.gate.set()
        await asyncio.gather(*tasks)
    assert [len(batch) for batch in predictor.launched] == [1, 4, 4]
    assert len(wake_ups) <= 3  # and never one an image


@on_a_loop
async def test_a_worker_that_vanishes_takes_its_waiting_images_along_and_no_others() -> None:
    async with service() as running:
        predictor = await running.start_engine()
        gone, stays = await running.ready_worker(0), await running.ready_worker(1)
        predictor.gate.clear()
        first = ask(stays, 0)
        await predictor.wait_until_busy()
        lost, kept = [ask(gone, red) for red in (1, 2)], ask(stays, 3)
        await until(lambda: running.counters.queue_depth[0] == 3)
        await gone.close()
        await until(lambda: running.counters.queue_depth[0] == 1)
        predictor.gate.set()
        for outcome in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(outcome, EngineUnavailable)
        assert (await first).outputs.indices.tolist() == expected_indices(0, 3)
        assert (await kept).outputs.indices.tolist() == expected_indices(3, 3)
    assert predictor.launched == [[0], [3]]


@on_a_loop
async def test_an_engine_that_vanishes_fails_what_it_had_and_the_next_one_is_found() -> None:
    async with service() as running:
        predictor = await running.start_engine()
        worker = await running.ready_worker()
        predictor.gate.clear()
        tasks = [ask(worker, 0)]
        await predictor.wait_until_busy()
        tasks += [ask(worker, red) for red in range(1, 5)]
        await until(lambda: running.counters.queue_depth[0] == 4)
        running.lose_connections(running.servers[0])
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineUnavailable)
        assert not worker.ready
        with pytest.raises(EngineUnavailable):
            await ask(worker, 6)
        assert worker.outstanding == 0
        await running.start_engine()
        await until(lambda: worker.ready)
        assert (await ask(worker, 7)).outputs.indices.tolist() == expected_indices(7, 3)


@on_a_loop
@pytest.mark.parametrize(
    ("error", "logged"),
    [(ConnectionRefusedError("nobody listens"), ["engine cuda: nobody listens"]), (BlockingIOError("many wait"), [])],
)
async def test_an_engine_that_is_not_reached_is_tried_again_and_who_only_waits_says_nothing(
    error: OSError, logged: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with service() as running:
        await running.start_engine()
        channel, errors = running.channels[0], [error]
        connect = channel.connect

        def refuse_once() -> socket.socket:
            if errors:
                raise errors.pop()
            return connect()

        monkeypatch.setattr(channel, "connect", refuse_once)
        worker = await running.worker(retry_seconds=0)
        await until(lambda: worker.ready)
        await worker.close()
        assert worker._connection is not None
        assert worker._connection.lost.is_set()
    assert [record.message for record in caplog.records if record.name.endswith("remote_engine")] == logged


@on_a_loop
async def test_workers_hear_of_an_engines_changes_at_once_and_of_its_end_before_the_connection_ends() -> None:
    class Changing(FakeEngine):
        def start(self, on_change: Callable[[], None]) -> None:
            self.changed = on_change
            on_change()

    async with service() as running:
        engine, heard = Changing(), list[str]()
        server = EngineServer(cast(LocalEngine, engine), running._channel_of_its_own(0), workers=2, refresh_seconds=1e6)
        await server.start()
        worker = await running.worker()
        worker._on_change = lambda: heard.append(worker.status.state)
        await until(lambda: worker.ready)
        engine.state = "failed"
        engine.changed()
        await until(lambda: not worker.ready)
        connection = worker._connection
        assert connection is not None
        await server.close()
        await connection.lost.wait()
        assert heard == ["ready", "failed", "closed"]


@on_a_loop
async def test_an_image_that_comes_between_the_end_of_a_connection_and_the_news_of_it_is_refused() -> None:
    async with service() as running:
        await running.start_engine()
        worker = await running.ready_worker()
        connection = worker._connection
        assert connection is not None
        connection.connection_lost(None)
        assert worker.ready
        with pytest.raises(EngineUnavailable, match="started again"):
            await worker.infer(InferenceRequest(pixels(1), RequestedOutputs(3)), timeout=PATIENCE)
        running.lose_connections(running.servers[0])


@on_a_loop
async def test_an_engine_that_says_it_failed_is_sent_nothing_and_its_reason_is_told() -> None:
    async with service() as running:
        predictor = await running.start_engine()
        worker = await running.ready_worker()
        failed = replace(worker.status, state="failed", reason="the device hangs")
        worker._on_status(StatusChanged(failed))  # its connection lives on until the process ends
        with pytest.raises(EngineUnavailable, match="the device hangs"):
            await ask(worker, 1)
        await worker.close()
        assert (worker.status.state, worker.status.reason) == ("failed", "the device hangs")  # why it ended stays known
    assert predictor.launched == []


@on_a_loop
@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (Failed.of(99, QueueFull("all taken")), "an answer to 99, which waits for none"),
        (Cancel(1), "Cancel out of order"),
    ],
    ids=["an answer to nothing", "a request"],
)
async def test_an_engine_that_says_what_it_may_not_is_left_and_found_again(
    frame: Frame, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with service() as running:
        predictor = await running.start_engine()
        worker = await running.ready_worker()
        connection = worker._connection
        assert connection is not None
        predictor.gate.clear()
        waiting = ask(worker, 1)
        await predictor.wait_until_busy()
        connection.data_received(encode(frame))
        with pytest.raises(EngineUnavailable, match="started again"):
            await waiting
        predictor.gate.set()
        await until(lambda: worker.ready and worker._connection is not connection)
        assert (await ask(worker, 2)).outputs.indices.tolist() == expected_indices(2, 3)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        f"engine connection: {reason}"
    ]


@on_a_loop
async def test_a_worker_hears_of_each_change_of_state() -> None:
    async with service() as running:
        states: list[str] = []
        worker = RemoteEngine(running.channels[0], 0, retry_seconds=0.001)
        running.remotes.append(worker)
        worker.start(lambda: states.append(worker.status.state))
        await running.start_engine()
        await until(lambda: worker.ready)
        running.lose_connections(running.servers[0])
        await until(lambda: not worker.ready)
        assert states == ["ready", "failed"]


@on_a_loop
async def test_nothing_is_left_of_a_worker_that_went_away() -> None:
    async with service() as running:
        await running.start_engine()
        one, other = await running.ready_worker(0), await running.ready_worker(1)
        connections = running.servers[0].connections
        both = set(connections)
        assert len(both) == 2
        await one.close()
        await until(lambda: len(connections) == 1)
        [gone] = both - connections
        assert gone._transport is None  # what is sent to it is dropped
        await other.close()
        await until(lambda: not connections)


@on_a_loop
async def test_a_worker_that_has_closed_hears_no_news() -> None:
    async with service() as running:
        await running.start_engine()
        worker = await running.ready_worker()
        ready = worker.status
        await worker.close()
        worker._on_status(StatusChanged(ready))
        assert not worker.ready
        assert (worker.status.state, worker.status.reason) == ("closed", "the engine is closed")
        with pytest.raises(EngineUnavailable, match="closed"):
            await ask(worker, 1)


@on_a_loop
async def test_a_status_is_published_only_when_it_has_changed() -> None:
    async with service() as running:
        predictor = await running.start_engine(refresh_seconds=0.001)
        worker = await running.ready_worker()
        heard: list[EngineStatus] = []
        original = worker._on_status

        def on_status(frame: StatusChanged | ModelLoaded) -> None:
            assert isinstance(frame, StatusChanged)
            heard.append(frame.status)
            original(frame)

        assert worker._connection is not None
        worker._connection._on_status = on_status
        for _ in range(10):
            running.servers[0]._publish_status()
        predictor.compiled = "compiled meanwhile"
        await until(lambda: worker.status.compiled == "compiled meanwhile")
        assert [status.compiled for status in heard] == ["compiled meanwhile"]


@on_a_loop
async def test_a_worker_that_came_first_waits_for_the_engine() -> None:
    async with service() as running:
        worker = await running.worker()
        assert (worker.status.state, worker.info) == ("loading", None)
        with pytest.raises(EngineUnavailable, match="loading"):
            await ask(worker, 1)
        await running.start_engine()
        await until(lambda: worker.ready)
        assert worker.info == model_info(device="cuda:0")
        assert worker.status.device == "cuda:0"


@on_a_loop
async def test_a_cancelled_images_slot_is_used_again_only_after_the_engine_has_let_go() -> None:
    async with service(slots=2) as running:
        predictor = await running.start_engine()
        worker = await running.ready_worker()
        predictor.gate.clear()
        busy = ask(worker, 1)
        await predictor.wait_until_busy()
        cancelled = ask(worker, 2)
        await until(lambda: running.counters.queue_depth[0] == 1)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert cancelled.cancelled()
        with pytest.raises(QueueFull):  # the engine has not heard of it yet
            await worker.infer(InferenceRequest(pixels(3), RequestedOutputs(3)), timeout=PATIENCE)
        await until(lambda: worker.outstanding == 1)
        after = ask(worker, 4)
        await until(lambda: running.counters.queue_depth[0] == 1)
        predictor.gate.set()
        assert (await busy).outputs.indices.tolist() == expected_indices(1, 3)
        assert (await after).outputs.indices.tolist() == expected_indices(4, 3)
    assert predictor.launched == [[1], [4]]


@on_a_loop
async def test_pixels_that_do_not_fit_into_a_slot_cost_no_slot() -> None:
    async with service(slots=1) as running:
        await running.start_engine()
        worker = await running.ready_worker()
        with pytest.raises(ValueError, match="broadcast"):
            wrong = InferenceRequest(pixels(1)[:2, :3], RequestedOutputs(3))
            await worker.infer(wrong, timeout=PATIENCE)
        assert (await ask(worker, 5)).outputs.indices.tolist() == expected_indices(5, 3)


@on_a_loop
async def test_an_image_cancelled_before_the_engine_has_seen_it_gives_its_slot_back() -> None:
    async with service(slots=1) as running:
        await running.start_engine()
        worker = await running.ready_worker()
        for red in range(20):
            task = ask(worker, red)
            await asyncio.sleep(0)
            task.cancel()  # Submit and Cancel leave in one write
            await asyncio.wait([task])
            await until(lambda: worker.outstanding == 0)
        assert (await ask(worker, 5)).outputs.indices.tolist() == expected_indices(5, 3)


@on_a_loop
@pytest.mark.parametrize("error", [ServiceError("of no kind that a frame can carry"), ZeroDivisionError("a defect")])
async def test_an_error_that_no_frame_can_carry_still_answers_its_image(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*_: object) -> None:
        raise error

    async with service() as running:
        await running.start_engine()
        worker = await running.ready_worker()
        monkeypatch.setattr(running.servers[0].engine, "submit", submit)
        with pytest.raises(InferenceFailed):
            async with asyncio.timeout(PATIENCE):
                await ask(worker, 1)


@on_a_loop
async def test_an_engine_keeps_its_name_while_it_is_started_again() -> None:
    """Metrics carry it as a label: `auto` would be another series."""
    async with service() as running:
        await running.start_engine()
        one = await running.ready_worker(0)
        running.lose_connections(running.servers[0])
        await until(lambda: one.status.state == "failed")
        new = await running.worker(1)  # it has never met an engine
        assert [worker.status.device for worker in (one, new)] == ["cuda:0", "cuda:0"]
        one._on_status(StatusChanged(EngineStatus("cuda", "loading", "the model is loading", "", None, 0)))
        assert (one.status.device, one.status.state) == ("cuda:0", "loading")
