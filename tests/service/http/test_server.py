"""The end of a web process: whoever was accepted is heard and answered, and one signal too many does no harm."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import cast

import pytest

from service.http import server as server_module
from service.http.connections import DescriptorWatch
from service.http.lifecycle import stop_signals
from service.http.listening import Acceptor
from service.http.protocol import HttpProtocol
from service.http.server import Server
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.http.listening import GET
from tests.service.http.wire import Wire
from tests.service.web.apps import App, Clock, app, until

HEARING_SECONDS = 0.5


@asynccontextmanager
async def started(service: App, sockets: list[socket.socket] | None = None) -> AsyncIterator[Server]:
    server = Server(service.asgi, service.settings, service.lifecycle)
    running = asyncio.create_task(server.serve(sockets))
    await until(lambda: server.started)
    yield server
    server.should_exit = True
    await running


def connect(server: Server) -> socket.socket:
    """A connection that the kernel has accepted; the loop, which does not run meanwhile, has not."""
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE)


def hear(wire: Wire, seconds: float) -> None:
    """Let time pass in many turns of the loop."""
    for _ in range(20):
        wire.clock.advance(seconds / 20)


async def answer_to(caller: socket.socket) -> bytes:
    with caller:
        return await asyncio.to_thread(caller.recv, 1 << 16)


@on_a_loop
@pytest.mark.parametrize("own_socket", [False, True])
async def test_callers_that_only_the_kernel_has_accepted_are_answered_when_it_stops(
    own_socket: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = app(port=0, drain_delay=0)
    callers: list[socket.socket] = []

    def speak(every_second: int) -> None:
        for caller in callers[every_second::2]:
            caller.send(GET)

    close = Acceptor.close

    async def at_the_last_moment(acceptor: Acceptor) -> None:
        callers.extend(connect(server) for _ in range(50))
        speak(0)
        asyncio.get_running_loop().call_later(HEARING_SECONDS / 2, speak, 1)  # the others only once they are accepted
        await close(acceptor)

    monkeypatch.setattr(Acceptor, "close", at_the_last_moment)
    sockets = [socket.create_server(("127.0.0.1", 0), backlog=100)] if own_socket else None
    async with started(service, sockets) as server:
        server.drain()
    answers = await asyncio.gather(*(answer_to(caller) for caller in callers))
    assert len(answers) == 50
    assert all(answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer for answer in answers)


@on_a_loop
async def test_a_server_that_drains_stops_when_the_delay_for_load_balancers_is_over() -> None:
    service = app(port=0, drain_delay=0.01)
    async with started(service) as server:
        server.drain()
        assert service.lifecycle.draining
        assert not server.should_exit
        await until(lambda: not server.started or server.should_exit)
        assert service.lifecycle.exit_code == 0


@on_a_loop
async def test_a_connection_that_is_silent_when_the_server_stops_is_heard_before_it_is_closed() -> None:
    for said in (b"", GET):
        async with Wire() as wire:
            wire.protocol.shutdown()
            hear(wire, HEARING_SECONDS / 2)
            assert not wire.closing
            await wire.send(said)
            assert wire.answers.statuses == ([200] if said else [])
            hear(wire, 2 * HEARING_SECONDS)
            assert wire.closing


@on_a_loop
async def test_a_loop_that_is_late_reads_five_times_before_it_closes() -> None:
    async with Wire() as wire:
        wire.protocol.shutdown()
        for _ in range(4):
            wire.clock.advance(HEARING_SECONDS)
            assert not wire.closing
        wire.clock.advance(HEARING_SECONDS)
        assert wire.closing


def test_a_connection_outlives_the_minute_of_load_balancers_and_answers_say_nothing_of_the_server() -> None:
    service = app()
    config = Server(service.asgi, service.settings, service.lifecycle).config
    assert (config.timeout_keep_alive, config.backlog) == (75, 2048)
    assert (config.server_header, config.access_log) == (False, False)


@on_a_loop
async def test_a_request_that_waits_when_the_server_stops_is_the_last_of_its_connection() -> None:
    async with Wire() as wire:
        wire.gate.clear()
        await wire.send(GET)
        wire.protocol.shutdown()
        hear(wire, 2 * HEARING_SECONDS)
        assert not wire.closing
        wire.gate.set()
        await wire.settle()
        assert wire.answers.statuses == [200]
        assert wire.closing


@on_a_loop
async def test_a_server_goes_on_for_the_delay_of_load_balancers_and_gives_the_signals_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    service = app(drain_delay=7)
    server = Server(service.asgi, service.settings, service.lifecycle)
    with server.capture_signals():
        monkeypatch.setattr(asyncio, "sleep", sleep)
        await server._drain_then_stop()
    assert (slept, server.should_exit) == ([7], True)
    assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)


@on_a_loop
async def test_what_is_to_run_beside_a_server_runs_while_it_does() -> None:
    began = asyncio.Event()

    async def beside() -> None:
        began.set()
        await asyncio.Event().wait()

    service = app(port=0)
    server = Server(service.asgi, service.settings, service.lifecycle, beside)
    running = asyncio.create_task(server.serve())
    await began.wait()
    server.should_exit = True
    await running


@on_a_loop
async def test_what_a_slow_reader_leaves_waits_in_the_process_where_it_is_bounded() -> None:
    async with started(app(port=0)) as server:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.send(GET.replace(b"/healthz", b"/docs/swagger-ui-bundle.js"))
            connections = cast("set[HttpProtocol]", server.server_state.connections)
            await until(lambda: [one.writable.is_set() for one in connections] == [False])
            [connection] = connections
            assert connection.transport.get_write_buffer_size() > 1_000_000


# Signals


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    codes: list[int] = []
    monkeypatch.setattr(server_module, "exit_now", codes.append)
    yield codes
    signal.signal(signal.SIGHUP, before)


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@on_a_loop
@pytest.mark.parametrize(
    ("received", "codes"),
    [
        ([HUP], []),
        ([HUP, HUP, HUP], []),
        ([TERM, HUP], []),
        ([HUP, TERM], []),
        ([HUP, TERM, TERM], [143]),
        ([TERM, TERM], [143]),
        ([TERM, INT], [130]),
        ([INT, HUP, TERM, INT], [130]),
    ],
)
async def test_a_hang_up_drains_and_is_never_the_second_signal(
    ended: list[int], received: list[signal.Signals], codes: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    service = app(port=0, drain_delay=600)
    async with started(service) as server:
        for number in received:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.001)
        await until(lambda: service.lifecycle.draining)
        assert server._drain is not None
        server._drain.cancel()
    assert ended == codes
    assert [message for message in caplog.messages if "draining" in message] == [f"{received[0].name}: draining"]
    assert [message for message in caplog.messages if "again" in message] == [
        f"{signal.Signals(code - 128).name} again: ending at once" for code in codes
    ]


@on_a_loop
async def test_a_hang_up_that_is_taken_as_another_wish_does_not_drain(ended: list[int]) -> None:
    service = app(port=0, drain_delay=600)
    taken: list[bool] = []

    def hung_up() -> bool:
        taken.append(True)
        return True

    async with started(service) as server:
        server._on_hang_up = hung_up
        os.kill(os.getpid(), HUP)
        await until(lambda: taken == [True])
        assert not service.lifecycle.draining
        os.kill(os.getpid(), TERM)
        await until(lambda: service.lifecycle.draining)
        os.kill(os.getpid(), HUP)
        await asyncio.sleep(0.001)
        assert server._drain is not None
        server._drain.cancel()
    assert (taken, ended) == ([True], [])


def test_a_hang_up_that_is_ignored_as_under_nohup_stays_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_DFL)
    try:
        assert HUP in stop_signals()
        signal.signal(HUP, signal.SIG_IGN)
        assert HUP not in stop_signals()
    finally:
        signal.signal(HUP, before)


# File descriptors


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_exhausted_descriptors_are_one_log_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = DescriptorWatch(clock)
    watch.check()
    assert caplog.records == []
    with no_descriptor_left():
        for _ in range(1_200):
            watch.check()
            clock.now += 0.1
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "no file descriptors are left" in caplog.text


def test_another_error_is_no_exhaustion(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOENT, "no /dev/null here")

    monkeypatch.setattr("service.http.connections.os.open", refuse)
    DescriptorWatch().check()
    assert caplog.records == []


@on_a_loop
async def test_a_running_server_looks_at_its_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    async with started(app(port=0)):
        with no_descriptor_left():
            await until(lambda: "no file descriptors are left" in caplog.text)
