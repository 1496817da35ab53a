"""A refusal of a small body keeps the connection; the rest of the body is thrown away within bounds."""

from __future__ import annotations

import pytest

from service.http.exchange import DISCARDED_BYTES
from service.http.protocol import HEAD_SECONDS
from tests.service.fakes import on_a_loop, png
from tests.service.http.listening import GET, listening, post
from tests.service.http.wire import Clock
from tests.service.web.apps import service_in, until

BODY = bytes(5000)


@on_a_loop
@pytest.mark.parametrize("sent_at_first", [-5000, -1, 10_000], ids=["head only", "almost all", "all"])
async def test_the_next_request_on_the_connection_of_a_refused_one_is_answered(sent_at_first: int) -> None:
    async with listening(queue_size=1) as server, server.connect() as connection:
        limiter = service_in(server.app).limiter
        with limiter.permit():
            for _ in range(3):
                await connection.send(post(BODY)[:sent_at_first])
                answer = await connection.answer()
                assert (answer.status, answer.code) == (503, "queue_full")
                assert "connection" not in answer.headers
                await connection.send(post(BODY)[sent_at_first:] if sent_at_first < 0 else b"")
        await connection.send(post(png(1)))
        assert (await connection.answer()).status == 200


@on_a_loop
@pytest.mark.parametrize(
    "request_bytes",
    [
        post(bytes(DISCARDED_BYTES + 1)),
        post(BODY, "Expect: 100-continue"),
        post(BODY, "Connection: close"),
        post(BODY, "Transfer-Encoding: chunked", length=False),
        post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"),
    ],
    ids=["long", "asks first", "closes", "of unknown length", "HTTP/1.0"],
)
async def test_a_refusal_of_a_body_that_may_not_come_or_not_end_closes(request_bytes: bytes) -> None:
    async with listening(queue_size=1) as server:
        with service_in(server.app).limiter.permit():
            for _ in range(2):
                answer = await server.ask(request_bytes.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
                assert (answer.status, answer.code) == (503, "queue_full")
                assert answer.headers["connection"] == "close"


@on_a_loop
async def test_a_refusal_while_the_service_ends_closes() -> None:
    async with listening() as server, server.connect() as connection:
        server.app.lifecycle.draining = True
        await connection.send(post(BODY)[:-1])
        answer = await connection.answer()
        assert (answer.status, answer.code, answer.headers["connection"]) == (503, "draining", "close")


@on_a_loop
async def test_the_rest_of_a_refused_body_has_as_long_as_a_head() -> None:
    clock = Clock()
    async with listening(clock) as server, server.connect() as connection:
        await connection.send(post(BODY, path="/nowhere")[:-9])
        assert (await connection.answer()).status == 404
        [protocol] = server.protocols
        for _ in range(8):
            protocol.data_received(b"x")
            clock.advance(HEAD_SECONDS / 8 - 0.01)
        assert not protocol.transport.is_closing()
        clock.advance(0.1)
        assert protocol.transport.is_closing()


@on_a_loop
async def test_a_connection_whose_refused_body_ended_is_kept_as_long_as_any_other() -> None:
    clock = Clock()
    async with listening(clock) as server, server.connect() as connection:
        await connection.send(post(BODY, path="/nowhere")[:-9])
        assert (await connection.answer()).status == 404
        [protocol] = server.protocols
        assert protocol.rank is not None
        assert not protocol.rank[0], "it goes before those that brought a whole request"
        await connection.send(bytes(9))
        await until(lambda: protocol.rank is not None and bool(protocol.rank[0]))
        clock.advance(599)  # `listening` keeps idle connections for 600 s
        await connection.send(GET)
        assert (await connection.answer()).status == 200
        clock.advance(601)
        assert await connection.is_closed()
