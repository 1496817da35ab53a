"""Of many refusals only the first of a second have log lines of their own; metrics count each."""

from __future__ import annotations

import logging

import pytest

from service.web.middleware import LINES_A_SECOND
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import GET, listening, post
from tests.service.web.apps import service_in, until


@on_a_loop
async def test_refusals_of_a_flood_are_all_counted_and_few_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    refused = LINES_A_SECOND + 5
    async with listening(queue_size=1) as server:
        with service_in(server.app).limiter.permit():
            for _ in range(refused):
                assert (await server.ask(post(png(1)))).status == 503
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


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_request"),  # TLS
        (b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, "malformed_request"),
        (b"GET /" + b"a" * (65 << 10), 400, "malformed_request"),
        (b"GET / HTTP/1.1\r\n\r\n", 400, "malformed_request"),
    ],
    ids=["TLS", "framing", "long", "no host"],
)
async def test_what_never_becomes_a_request_is_counted_and_logged(
    sent: bytes, status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with listening() as server:
        answer = await server.ask(sent)
        assert (answer.status, answer.code) == (status, code)
        assert server.app.metric("vit_requests_total", endpoint="unparsed", code=str(status)) == 1
        assert server.app.metric("vit_rejected_total", reason=code) == 1
    [line] = [line for line in caplog.messages if line.startswith(f"no request: {status} ")]
    assert line.endswith(answer.headers["x-request-id"])


@on_a_loop
async def test_of_many_that_never_become_requests_all_are_counted_and_few_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    count = LINES_A_SECOND + 5
    async with listening() as server:
        for _ in range(count):
            assert (await server.ask(b"hello\r\n\r\n")).status == 400
        assert server.app.metric("vit_requests_total", endpoint="unparsed", code="400") == count
        assert len([line for line in caplog.messages if line.startswith("no request: ")]) <= LINES_A_SECOND
        server.app.asgi.log.end_second()
    assert caplog.messages[-1] == "refused 5 more: 5 malformed_request"


@on_a_loop
async def test_a_connection_too_many_is_counted() -> None:
    async with listening(max_connections=1) as server, server.connect() as busy:
        server.app.engine.gate.clear()
        await busy.send(post(png(1)))
        await until(lambda: server.app.engine.waiting == 1)
        assert (await server.ask(GET)).code == "receiving_full"
        assert server.app.metric("vit_rejected_total", reason="receiving_full") == 1
        server.app.engine.gate.set()
        assert (await busy.answer()).status == 200
