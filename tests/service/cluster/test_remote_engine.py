"""What only engines in other processes have to get right: several workers, lost connections, slots, several devices."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from model.prediction import MapRequest
from service.cluster.balancer import Balancer
from service.cluster.channel import EngineChannel
from service.cluster.engine_server import EngineServer
from service.cluster.protocol import Hello, Submit, encode
from service.cluster.remote_engine import RemoteEngine
from service.cluster.shared_memory import SharedCounters
from service.engine.local import LocalEngine
from service.engine.messages import InferenceRequest, InferenceResult
from service.errors import EngineUnavailable, QueueFull
from tests.service.fakes import PATIENCE, FakePredictor, expected_indices, model_info, on_a_loop, pixels


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)


@dataclass
class Service:
    """Engines behind channels and workers that ask them."""

    counters: SharedCounters
    channels: list[EngineChannel]
    slots: int
    predictors: list[FakePredictor] = field(default_factory=list)
    servers: list[EngineServer] = field(default_factory=list)
    remotes: list[RemoteEngine] = field(default_factory=list)

    async def start_engine(self, index: int = 0) -> FakePredictor:
        """An engine process's part; its predictor."""
        predictor = FakePredictor(device=f"cuda:{index}")

        def on_queue(depth: int) -> None:
            self.counters.queue_depth[index] = depth

        engine = LocalEngine(
            lambda: (predictor, model_info(device=f"cuda:{index}")),
            device="cuda",
            queue_size=self.slots,
            max_delay=0,
            on_batch=lambda _: None,
            on_queue=on_queue,
        )
        server = EngineServer(engine, self._channel_of_its_own(index), workers=2)
        self.predictors.append(predictor)
        self.servers.append(server)
        await server.start()
        return predictor

    def _channel_of_its_own(self, index: int) -> EngineChannel:
        """With a listener that the server may close, as a forked process has it."""
        channel = EngineChannel.__new__(EngineChannel)
        channel.__dict__ |= self.channels[index].__dict__ | {"listener": self.channels[index].listener.dup()}
        return channel

    async def worker(self, number: int = 0, engine: int = 0) -> RemoteEngine:
        remote = RemoteEngine(self.channels[engine], number)
        remote.start(lambda: None)
        self.remotes.append(remote)
        return remote

    async def ready_worker(self, number: int = 0, engine: int = 0) -> RemoteEngine:
        remote = await self.worker(number, engine)
        await until(lambda: remote.ready)
        return remote

    def lose_connections(self, server: EngineServer) -> None:
        """As when the engine process is killed."""
        server._server.close()
        for connection in list(server._connections):
            connection._transport.abort()  # type: ignore[union-attr]


@asynccontextmanager
async def service(engines: int = 1, slots: int = 8) -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        counters = stack.enter_context(SharedCounters(workers=2, engines=engines, capacity=slots))
        channels = [EngineChannel(index, "cuda", counters, slots=slots) for index in range(engines)]
        for channel in channels:
            stack.callback(channel.close)
        made = Service(counters, channels, slots)
        try:
            yield made
        finally:
            for predictor in made.predictors:
                predictor.gate.set()
            for remote in made.remotes:
                await remote.close()
            for server in made.servers:
                await server.close()


def ask(engine: RemoteEngine | Balancer, red: int, **options: Any) -> asyncio.Task[InferenceResult]:
    return asyncio.create_task(engine.infer(InferenceRequest(pixels(red), 3, **options), timeout=PATIENCE))


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
            assert (await task).indices.tolist() == expected_indices(red, 3)
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
        tasks += [ask(worker, red, map=MapRequest(2)) for red in range(1, 9)]
        await until(lambda: running.counters.queue_depth[0] == 8)
        connection = worker._connection
        assert connection is not None
        wake_ups = []
        original = connection._reader.feed
        monkeypatch.setattr(connection._reader, "feed", lambda data: wake_ups.append(len(data)) or original(data))
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
        assert (await first).indices.tolist() == expected_indices(0, 3)
        assert (await kept).indices.tolist() == expected_indices(3, 3)
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
        assert (await ask(worker, 7)).indices.tolist() == expected_indices(7, 3)


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
        with pytest.raises(QueueFull):  # the engine has not heard of it yet
            await worker.infer(InferenceRequest(pixels(3), 3), timeout=PATIENCE)
        await until(lambda: worker.outstanding == 1)
        after = ask(worker, 4)
        await until(lambda: running.counters.queue_depth[0] == 1)
        predictor.gate.set()
        assert (await busy).indices.tolist() == expected_indices(1, 3)
        assert (await after).indices.tolist() == expected_indices(4, 3)
    assert predictor.launched == [[1], [4]]


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
        assert (await ask(worker, 5)).indices.tolist() == expected_indices(5, 3)


@on_a_loop
@pytest.mark.parametrize("stranger", ["wrong key", "no such worker", "no hello", "garbage"])
async def test_a_stranger_is_shown_out_and_harms_nobody(stranger: str) -> None:
    async with service() as running:
        await running.start_engine()
        worker = await running.ready_worker()
        channel = running.channels[0]
        says = {
            "wrong key": encode(Hello(0, bytes(32))),
            "no such worker": encode(Hello(2, channel.key)),
            "no hello": encode(Submit(1, 0, 1, None, 1.0)),
            "garbage": b"\x02\x00\x00\x00\x63xx",
        }[stranger]
        reader, writer = await asyncio.open_unix_connection(sock=channel.connect())
        writer.write(says)
        assert await reader.read() == b""
        writer.close()
        assert (await ask(worker, 5)).indices.tolist() == expected_indices(5, 3)


def test_the_address_is_no_file() -> None:
    with SharedCounters(workers=1, engines=1, capacity=1) as counters:
        channel = EngineChannel(0, "cpu", counters, slots=1)
        assert channel.listener.getsockname().startswith(b"\0")
        with channel.connect() as connection:
            assert connection.family == socket.AF_UNIX
        channel.close()
        with pytest.raises(OSError):
            channel.connect()


def test_lost_connections_leave_no_descriptor_behind() -> None:
    def open_now() -> int:
        gc.collect()  # maps of memory go with their last view
        return len(list(Path("/proc/self/fd").iterdir()))

    @on_a_loop
    async def lose_an_engine() -> None:
        async with service() as running:
            await running.start_engine()
            worker = await running.ready_worker()
            await ask(worker, 1)
            running.lose_connections(running.servers[0])
            await until(lambda: not worker.ready)
            await running.start_engine()
            await until(lambda: worker.ready)
            await ask(worker, 2)

    lose_an_engine()
    before = open_now()
    lose_an_engine()
    assert open_now() == before


# Several devices


@on_a_loop
async def test_an_image_goes_to_the_engine_with_the_shortest_queue_over_all_workers() -> None:
    async with service(engines=2, slots=20) as running:
        predictors = [await running.start_engine(index) for index in (0, 1)]
        other = await running.ready_worker(1, 0)
        group = Balancer([await running.ready_worker(0, index) for index in (0, 1)])
        for predictor in predictors:
            predictor.gate.clear()
        tasks = [ask(other, red) for red in range(6)]
        await until(lambda: int(running.counters.outstanding.sum()) == 6)
        tasks += [ask(group, red) for red in range(100, 110)]
        await until(lambda: int(running.counters.outstanding.sum()) == 16)
        assert running.counters.outstanding.sum(axis=0).tolist() == [8, 8]
        assert running.counters.outstanding.tolist() == [[2, 8], [6, 0]]
        for predictor in predictors:
            predictor.gate.set()
        await asyncio.gather(*tasks)
        assert running.counters.outstanding.sum() == 0


@on_a_loop
async def test_equals_are_used_in_turn() -> None:
    async with service(engines=2) as running:
        predictors = [await running.start_engine(index) for index in (0, 1)]
        group = Balancer([await running.ready_worker(0, index) for index in (0, 1)])
        for red in range(6):
            await ask(group, red)
    assert [len(predictor.launched) for predictor in predictors] == [3, 3]


@on_a_loop
async def test_a_group_is_ready_as_long_as_one_engine_is() -> None:
    async with service(engines=2) as running:
        group = Balancer([await running.worker(0, index) for index in (0, 1)])
        assert group.status.state == "loading"
        assert group.info is None
        await running.start_engine(1)
        await until(lambda: group.status.state == "ready")
        assert group.info is not None
        assert group.info.device == "cuda:1"
        assert (await ask(group, 1)).indices.tolist() == expected_indices(1, 3)
        await running.start_engine(0)
        await until(lambda: all(engine.ready for engine in group.engines))
        assert group.info.device == "cuda:0,cuda:1"
        running.lose_connections(running.servers[0])
        await until(lambda: not group.engines[1].ready)
        for red in range(4):
            assert (await ask(group, red)).indices.tolist() == expected_indices(red, 3)
        running.lose_connections(running.servers[1])
        await until(lambda: not group.engines[0].ready)
        assert group.status.state == "failed"
        with pytest.raises(EngineUnavailable, match="started again"):
            await ask(group, 1)
