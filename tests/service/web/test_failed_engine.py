"""How a server ends when its engine has failed."""

from __future__ import annotations

import asyncio
import socket
from typing import NoReturn

import pytest

from service.http import server as server_module
from service.http.server import Server
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import post
from tests.service.web.apps import App, app, until


class Ended(BaseException):
    """In the place of the end of the process."""


async def start(service: App) -> tuple[Server, asyncio.Task[None], int]:
    server = Server(service.asgi, service.settings, service.lifecycle)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    await until(lambda: server.started)
    return server, serving, server.port


@on_a_loop
async def test_after_a_failed_engine_a_hanging_caller_is_waited_for_within_the_drain_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []

    def end(code: int) -> NoReturn:
        ended.append(code)
        raise Ended

    monkeypatch.setattr(server_module, "exit_now", end)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    service = app(drain_timeout=0.05, drain_delay=600)
    service.engine.gate.clear()
    server, serving, port = await start(service)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post(png(1)))
    await until(lambda: service.engine.waiting == 1)
    server.stop(exit_code=1)
    await until(lambda: ended != [])
    assert ended == [1]
    assert not serving.done()
    service.engine.gate.set()
    await serving
    writer.close()


@on_a_loop
async def test_after_a_failed_engine_a_server_without_callers_ends_at_once() -> None:
    service = app(drain_timeout=600, drain_delay=600)
    server, serving, _ = await start(service)
    server.stop(exit_code=1)
    await serving
    assert service.lifecycle.exit_code == 1
