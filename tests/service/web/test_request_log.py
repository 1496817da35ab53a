"""Of many refusals only the first of a second have log lines of their own; metrics count each."""

from __future__ import annotations

import logging

import pytest

from service.web.middleware import LINES_A_SECOND
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import listening, post
from tests.service.web.apps import service_in


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "line", "code"),
    [(post(png(1)), " 503 ", "queue_full"), (b"hello\r\n\r\n", "no request: ", "malformed_request")],
)
async def test_refusals_of_a_flood_are_all_counted_and_few_are_logged(
    sent: bytes, line: str, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    refused = LINES_A_SECOND + 5
    async with listening(queue_size=1) as server:
        with service_in(server.app).limiter.permit():
            for _ in range(refused):
                assert (await server.ask(sent)).code == code
        assert server.app.metric("vit_rejected_total", reason=code) == refused
        assert len([message for message in caplog.messages if line in message]) <= LINES_A_SECOND
        server.app.asgi.log.end_second()
    assert caplog.messages[-1] == f"refused 5 more: 5 {code}"


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
