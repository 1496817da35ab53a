"""How workers and engines meet: strangers, many at once, and what is left of lost connections."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from model.outputs import RequestedOutputs
from service.cluster.channel import EngineChannel, peer_user
from service.cluster.protocol import Hello, Submit, encode
from service.cluster.shared_memory import SharedCounters
from tests.service.cluster.engines import ask, service, until
from tests.service.fakes import expected_indices, on_a_loop


@on_a_loop
@pytest.mark.parametrize("stranger", ["wrong key", "no such worker", "no hello", "garbage", "long frame"])
async def test_a_stranger_is_shown_out_and_harms_nobody(stranger: str, caplog: pytest.LogCaptureFixture) -> None:
    async with service() as running:
        await running.start_engine()
        worker = await running.ready_worker()
        channel = running.channels[0]
        says = {
            "wrong key": encode(Hello(0, bytes(32))),
            "no such worker": encode(Hello(2, channel.key)),
            "no hello": encode(Submit(1, 0, 1.0, RequestedOutputs(1))),
            "garbage": b"\x02\x00\x00\x00\x63xx",
            "long frame": (1025).to_bytes(4, "little"),
        }[stranger]
        reader, writer = await asyncio.open_unix_connection(sock=channel.connect())
        writer.write(says)
        assert await reader.read() == b""
        writer.close()
        assert [record.levelname for record in caplog.records if "engine connection" in record.message] == ["ERROR"]
        assert (await ask(worker, 5)).outputs.indices.tolist() == expected_indices(5, 3)


@on_a_loop
async def test_a_worker_says_only_once_which_it_is() -> None:
    async with service() as running:
        await running.start_engine()
        channel = running.channels[0]
        reader, writer = await asyncio.open_unix_connection(sock=channel.connect())
        writer.write(encode(Hello(0, channel.key)) + encode(Hello(1, channel.key)))
        async with asyncio.timeout(10):
            await reader.read()  # the status, and the end
        writer.close()


@on_a_loop
async def test_another_user_is_shown_out_unheard_even_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    async with service() as running:
        await running.start_engine()
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)  # so that we are the other user
        reader, writer = await asyncio.open_unix_connection(sock=running.channels[0].connect())
        writer.write(encode(Hello(0, running.channels[0].key)))
        with suppress(ConnectionResetError):  # which it is if the frame came before the end
            assert await reader.read(1) == b""
        writer.close()
        assert running.servers[0].connections == set()


def test_the_peers_user_is_the_kernels_word() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert peer_user(one) == os.geteuid()


@pytest.fixture
def channel() -> Iterator[EngineChannel]:
    with closing(SharedCounters(workers=1, engines=1, capacity=1)) as counters:
        channel = EngineChannel(0, "cpu", counters, slots=1)
        yield channel
        channel.close()


def test_the_address_is_no_file(channel: EngineChannel) -> None:
    assert channel.listener.getsockname().startswith(b"\0")
    with channel.connect() as connection:
        assert connection.family == socket.AF_UNIX
    channel.listener.close()
    with pytest.raises(OSError):
        channel.connect()


def fill(channel: EngineChannel, connections: ExitStack) -> int:
    """Connect until there is no room for one more to wait; how many wait."""
    for count in range(100_000):
        try:
            connections.enter_context(channel.connect())
        except BlockingIOError:
            return count
    raise AssertionError("it never fills")


def test_more_connections_than_can_wait_are_refused_and_block_nobody(channel: EngineChannel) -> None:
    with ExitStack() as connections:
        assert fill(channel, connections) >= 128


def test_twice_as_many_as_there_are_workers_can_wait() -> None:
    with (
        closing(SharedCounters(workers=100, engines=1, capacity=1)) as counters,
        closing(EngineChannel(0, "cpu", counters, slots=1)) as channel,
        ExitStack() as connections,
    ):
        assert fill(channel, connections) == 200 + 1  # the kernel lets one more in


def test_every_worker_can_wait_for_the_engine() -> None:
    workers = min(1000, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    with (
        closing(SharedCounters(workers=workers, engines=1, capacity=1)) as counters,
        closing(EngineChannel(0, "cpu", counters, slots=1)) as channel,
        ExitStack() as connections,
    ):
        for _ in range(workers):
            connections.enter_context(channel.connect())


@on_a_loop
async def test_a_worker_for_whom_there_is_no_room_to_wait_connects_when_there_is() -> None:
    async with service() as running:
        with ExitStack() as connections:
            fill(running.channels[0], connections)
            worker = await running.worker(retry_seconds=0.001)
            await asyncio.sleep(0)
            assert worker.status.state == "loading"
        await running.start_engine()
        await until(lambda: worker.ready)
        assert (await ask(worker, 5)).outputs.indices.tolist() == expected_indices(5, 3)


@on_a_loop
async def test_a_status_that_changes_without_an_event_reaches_the_workers() -> None:
    async with service() as running:
        predictor = await running.start_engine(refresh_seconds=0.001)
        worker = await running.ready_worker()
        assert worker.status.compiled == predictor.compiled
        predictor.compiled = "compiled meanwhile"
        await until(lambda: worker.status.compiled == "compiled meanwhile")


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
