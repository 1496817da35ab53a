"""The end of a web process: accepted requests are answered, extra signals do no harm."""

import asyncio
import os
import resource
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from service import draining as module
from service.draining import Terminal, stop_signals
from service.server import Server, connection_limit
from tests.service.fakes import on_a_loop, png, until
from tests.service.http.listening import Connection, post
from tests.service.web.apps import App, app

TERM = signal.SIGTERM
INT = signal.SIGINT
HUP = signal.SIGHUP


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    before = signal.signal(HUP, signal.SIG_DFL)  # ignored where the tests run under nohup
    codes: list[int] = []
    monkeypatch.setattr(module, "exit_now", codes.append)
    yield codes
    signal.signal(HUP, before)


@asynccontextmanager
async def started(service: App, **options: Any) -> AsyncIterator[Server]:
    server = Server(service.asgi, service.settings, service.lifecycle, **options)
    running = asyncio.create_task(server.serve())
    await until(lambda: server.is_listening)
    yield server
    server.stop(service.lifecycle.exit_code)
    await running


@on_a_loop
async def test_unix_socket_is_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "http"
    async with started(app(host=f"unix:{path}")) as server:
        assert server.port == 0
        caller = Connection(*await asyncio.open_unix_connection(path))
        await caller.send(b"GET /healthz HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert (await caller.answer()).status == 200
    assert not path.exists()


@on_a_loop
async def test_a_stop_answers_queued_connections() -> None:
    service = app(port=0, drain_delay=0)
    async with started(service) as server:
        let_in = Connection(*await asyncio.open_connection("127.0.0.1", server.port))
        await let_in.send(post(png(1)))
        assert (await let_in.answer()).status == 200
        # This call blocks the event loop, so the system queues the connection.
        with socket.create_connection(("127.0.0.1", server.port)) as queued:
            server.drain()
            port = server.port
            await until(lambda: server.connections.ending_since is not None)
            await asyncio.sleep(0.3)  # by now, uvicorn has closed idle connections
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", port)
            late = Connection(*await asyncio.open_connection(sock=queued.dup()))
            for caller in (let_in, late):
                await caller.send(post(png(1)))
                answer = await caller.answer()
                assert (answer.status, answer.headers["connection"]) == (200, "close")


@on_a_loop
@pytest.mark.parametrize("code", [0, 3])
async def test_drain_timeout_ends_the_server(ended: list[int], code: int) -> None:
    service = app(port=0, drain_delay=0, drain_timeout=0.05)
    service.engine.gate.clear()
    async with started(service) as server:
        caller = Connection(*await asyncio.open_connection("127.0.0.1", server.port))
        await caller.send(post(png(1)))
        await until(lambda: service.engine.waiting == 1)
        server.stop(code)
        await until(lambda: ended != [])
        service.engine.gate.set()
        assert (await caller.answer()).status == 200
    assert ended[0] == service.lifecycle.exit_code == code


@on_a_loop
@pytest.mark.parametrize(
    ("received", "codes"),
    [
        ([HUP, HUP], []),
        ([TERM, HUP], []),
        ([HUP, TERM], []),
        ([HUP, TERM, TERM], [143]),
        ([INT, HUP, TERM, INT], [130]),
    ],
)
async def test_a_hang_up_is_no_second_signal(
    ended: list[int], received: list[signal.Signals], codes: list[int]
) -> None:
    service = app(port=0, drain_delay=600)
    async with started(service):
        for number in received:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.001)
        await until(lambda: service.lifecycle.stopping)
    assert ended == codes


@on_a_loop
@pytest.mark.parametrize("supervised", [False, True])
async def test_handled_hang_up_does_not_drain(ended: list[int], supervised: bool) -> None:
    service = app(port=0, drain_delay=600)
    taken = list[bool]()

    def hung_up() -> bool:
        taken.append(True)
        return True

    async with started(service, on_hang_up=hung_up, is_supervised=supervised):
        os.kill(os.getpid(), HUP)
        await asyncio.sleep(0.01)
        assert not service.lifecycle.stopping
        for _ in range(2 if supervised else 1):
            os.kill(os.getpid(), TERM)
            await asyncio.sleep(0.001)
        await until(lambda: service.lifecycle.stopping)
    assert (taken, ended) == ([] if supervised else [True], [])


def test_nohup_keeps_hang_up_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)
    try:
        assert HUP not in stop_signals()
    finally:
        signal.signal(HUP, before)


def test_a_closed_terminal_reloads_nothing() -> None:
    reloads: list[bool] = []
    ours, its = os.openpty()
    terminal = Terminal([its])
    assert terminal.hang_up(lambda: reloads.append(True))
    os.close(ours)
    assert not terminal.hang_up(lambda: reloads.append(True))
    assert Terminal([]).hang_up(lambda: reloads.append(True))
    assert len(reloads) == 2
    os.close(its)


@on_a_loop
async def test_unread_answer_waits_in_the_process() -> None:
    async with started(app(port=0)) as server:
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", server.port))
            reader.send(b"GET /docs/swagger-ui-bundle.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await until(lambda: len(server.connections.open) == 1)
            [guard] = server.connections.open
            await until(lambda: guard.transport.get_write_buffer_size() > 200_000)


@pytest.mark.parametrize(
    ("soft", "hard", "limit", "raised_to"),
    [
        (100_000, 100_000, 1000, None),
        (-1, -1, 1000, None),
        (1024, 4096, 1000, 1128),
        (20, 20, 1, 20),
    ],
)
def test_open_files_limit_the_connections(
    soft: int, hard: int, limit: int, raised_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert connection_limit(1000) == limit
    assert raised == ([] if raised_to is None else [(raised_to, hard)])


@on_a_loop
async def test_failed_start_ends_at_once(ended: list[int]) -> None:
    service = app(port=0)
    server = Server(service.asgi, service.settings, service.lifecycle)
    running = asyncio.create_task(server.serve())
    server.stop(1)
    async with asyncio.timeout(10):
        await running
    assert ended == []
