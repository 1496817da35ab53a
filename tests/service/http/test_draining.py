"""How long a server that is to end waits for its callers, by an event loop whose timers a test looks at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from service.http import server as server_module
from service.http.server import Server
from tests.service.fakes import on_a_loop
from tests.service.web.apps import app, settle


@on_a_loop
@pytest.mark.parametrize(
    ("end", "code"),
    [(Server.drain, 0), (lambda server: server.stop(exit_code=3), 3)],
    ids=["asked to", "nothing left to serve"],
)
async def test_a_server_ends_at_the_latest_when_the_time_for_draining_is_over(
    end: Callable[[Server], None], code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    exits: list[int] = []
    service = app(drain_delay=0, drain_timeout=20)
    server = Server(service.asgi, service.settings, service.lifecycle)
    monkeypatch.setattr(server_module, "exit_now", exits.append)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", lambda *timer: timers.append(timer))
        end(server)
        await settle()
    assert (service.lifecycle.draining, server.should_exit, exits) == (True, True, [])
    [(seconds, give_up)] = timers
    give_up()
    assert (seconds, exits) == (20, [code])
    assert caplog.messages == ["not everything was answered within 20 s: ending"]
