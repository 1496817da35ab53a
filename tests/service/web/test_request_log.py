"""Of many refusals only the first of a second have log lines of their own; metrics count each."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from service.logs import JsonFormatter
from service.web.request_log import LINES_A_SECOND, RequestLog
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import listening, post
from tests.service.http.wire import Clock
from tests.service.web.apps import pipeline_of


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


def test_the_first_of_each_second_have_their_own_lines_and_the_rest_one_together(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog()
    for _ in range(2):
        own = [log.has_own_line("queue_full") for _ in range(LINES_A_SECOND + 3)]
        own += [log.has_own_line("draining")]
        assert own == [True] * LINES_A_SECOND + [False] * 4
        assert not caplog.records
        clock.advance(1)
        [record] = caplog.records
        assert record.getMessage() == "refused 4 more: 3 queue_full, 1 draining"
        assert json.loads(JsonFormatter().format(record))["refused"] == {"queue_full": 3, "draining": 1}
        caplog.clear()


def test_a_second_with_few_refusals_has_no_further_line(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = RequestLog()
    assert all(log.has_own_line("queue_full") for _ in range(LINES_A_SECOND))
    clock.advance(1)
    assert log.has_own_line("queue_full")
    assert not caplog.records


@on_a_loop
async def test_refusals_of_a_flood_are_all_counted_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refused = LINES_A_SECOND + 5
    async with listening(queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            for _ in range(refused):  # the first by the application, the others without it
                await connection.send(post(png(1)))
                assert (await connection.answer()).status == 503
        assert server.app.metric("vit_requests_total", endpoint="/classify", code="503") == refused
        assert server.app.metric("vit_rejected_total", reason="queue_full") == refused
        assert len([line for line in caplog.messages if " 503 " in line]) <= LINES_A_SECOND
        server.app.asgi.log.end_second()
    assert caplog.messages[-1] == "refused 5 more: 5 queue_full"


@on_a_loop
async def test_what_is_answered_otherwise_always_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as server, server.connect() as connection:
        for _ in range(LINES_A_SECOND + 5):
            await connection.send(post(png(1), path="/nowhere"))
            assert (await connection.answer()).status == 404
    assert len([line for line in caplog.messages if " 404 " in line]) == LINES_A_SECOND + 5
