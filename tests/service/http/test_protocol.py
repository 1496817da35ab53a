"""Raw bytes on real sockets: heads and framings that no client library would send."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from service.http.connections import STALL_SECONDS
from service.http.exchange import Exchange
from service.http.protocol import LINGER_SECONDS
from service.web.admission import RefusalPace
from tests.service.fakes import PATIENCE, on_a_loop, png
from tests.service.http.listening import GET, listening, post
from tests.service.http.wire import Clock, Wire
from tests.service.web.apps import service_in, until


@on_a_loop
async def test_a_picture_sent_byte_by_byte_is_answered() -> None:
    async with listening() as server, server.connect() as connection:
        for byte in post(png(7)):
            await connection.send(bytes([byte]))
        answer = await connection.answer()
    assert answer.status == 200
    assert json.loads(answer.body)["predictions"][0]["index"] == 7


@on_a_loop
async def test_a_chunked_picture_is_answered_and_the_connection_lives_on() -> None:
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in png(3)) + b"0\r\nX-Trailer: a\r\n\r\n"
    async with listening() as server, server.connect() as connection:
        for _ in range(2):
            await connection.send(post(b"", "Transfer-Encoding: chunked", length=False) + chunks)
            answer = await connection.answer()
            assert json.loads(answer.body)["predictions"][0]["index"] == 3


@on_a_loop
@pytest.mark.parametrize(
    "head",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"hello\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /healthz HTTP/9.9\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n: x\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nA: \x00\r\n\r\n",
        b"GET /health\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        post(b"x", "Content-Length: -1", length=False),
        post(b"x", "Content-Length: 1x", length=False),
        post(b"x", "Content-Length: ", length=False),
        post(b"x", "Content-Length: 99999999999999999999999999", length=False),
        post(b"x", "Content-Length: 1", "Content-Length: 2", length=False),
        post(b"x", "Content-Length: 1", "Content-Length: 1", length=False),
        post(b"1\r\nx\r\n0\r\n\r\n", "Content-Length: 5", "Transfer-Encoding: chunked", length=False),
        post(b"1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked", "Content-Length: 5", length=False),
        post(b"x", "Transfer-Encoding: chunked, identity", length=False),
        post(b"x", "Transfer-Encoding: x", length=False),
    ],
    ids=lambda head: head.split(b"\r\n\r\n")[0][-45:].decode("latin-1").encode("unicode_escape").decode(),
)
async def test_what_is_not_http_is_400_with_a_problem_document_and_closes(head: bytes) -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(head)
        answer = await connection.answer()
        assert (answer.status, answer.code) == (400, "malformed_request")
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()
        assert (await server.ask(GET)).status == 200


@on_a_loop
async def test_a_refused_head_is_answered_under_the_callers_request_id() -> None:
    async with listening() as server:
        answer = await server.ask(b"GET / HTTP/1.1\r\nHost: x\r\nX-Request-ID: mine-1\r\nContent-Length: -1\r\n\r\n")
    assert (answer.code, answer.headers["x-request-id"]) == ("malformed_request", "mine-1")


@on_a_loop
async def test_garbage_after_an_answer_does_not_borrow_the_last_request_id() -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-Request-ID: mine-1\r\n\r\n")
        assert (await connection.answer()).headers["x-request-id"] == "mine-1"
        await connection.send(b"\x00\x01\x02")
        answer = await connection.answer()
    assert answer.code == "malformed_request"
    assert answer.headers["x-request-id"] != "mine-1"


@on_a_loop
@pytest.mark.parametrize(
    "body",
    [b"zz\r\nx\r\n0\r\n\r\n", b"-1\r\nx\r\n", b"1\r\nxx\r\n0\r\n\r\n", b"5\r\nabcde\r\nq", b"ffffffffffffffffff\r\n"],
    ids=["no number", "negative", "too long", "no number later", "overflow"],
)
async def test_a_broken_chunk_is_the_requests_own_400_and_frees_its_place(body: bytes) -> None:
    async with listening(queue_size=1) as server, server.connect() as connection:
        await connection.send(post(body, "Transfer-Encoding: chunked", "X-Request-ID: mine", length=False))
        answer = await connection.answer()
        assert (answer.status, answer.code) == (400, "malformed_request")
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()
        assert service_in(server.app).limiter.in_use == 0
        assert server.app.metric("vit_requests_total", endpoint="/classify", code="400") == 1
        assert server.app.metric("vit_cancelled_total") == 0
        assert (await server.ask(post(png(1)))).status == 200


@on_a_loop
async def test_broken_framing_of_a_body_that_nobody_reads_harms_nothing() -> None:
    """The answer is out, or about to be: it stays the only one, and the connection closes."""
    async with listening() as server, server.connect() as connection:
        await connection.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        answer = await connection.answer()
        assert answer.status in (200, 400)
        assert await connection.is_closed()


@on_a_loop
async def test_garbage_behind_a_waiting_request_does_not_take_its_answer() -> None:
    async with listening() as server, server.connect() as connection:
        server.app.engine.gate.clear()
        await connection.send(post(png(5)) + b"\x00garbage\r\n\r\n")
        while server.app.engine.waiting == 0:
            await asyncio.sleep(0.001)
        await connection.send(b"more garbage")
        server.app.engine.gate.set()
        answer = await connection.answer()
        assert answer.status == 200
        assert json.loads(answer.body)["predictions"][0]["index"] == 5
        assert await connection.is_closed()


@on_a_loop
async def test_a_connection_remembers_that_its_last_request_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[float | None] = []

    async def turn(pace: RefusalPace, exchange: Exchange) -> None:
        before.append(exchange.refused_before)
        await original(pace, exchange)

    original = RefusalPace.turn
    monkeypatch.setattr(RefusalPace, "turn", turn)
    async with listening(queue_size=1) as server, server.connect() as connection:
        with service_in(server.app).limiter.permit():
            for _ in range(2):
                await connection.send(post(png(7)))
                assert (await connection.answer()).status == 503
    first, second = before
    assert first is None
    assert second is not None


@on_a_loop
async def test_pipelined_requests_are_answered_in_their_order() -> None:
    async with listening() as server, server.connect() as connection:
        server.app.engine.gate.clear()
        nope = GET.replace(b"/healthz", b"/nope")
        await connection.send(post(png(1)) + GET + post(png(2)) + nope + post(png(3)))
        while server.app.engine.waiting == 0:
            await asyncio.sleep(0.001)
        server.app.engine.gate.set()
        answers = [await connection.answer() for _ in range(5)]
    assert [answer.status for answer in answers] == [200, 200, 200, 404, 200]
    indices = [json.loads(answers[i].body)["predictions"][0]["index"] for i in (0, 2, 4)]
    assert indices == [1, 2, 3]


@on_a_loop
async def test_of_very_many_pipelined_requests_the_first_are_answered_and_the_connection_closes() -> None:
    async with listening() as server, server.connect() as connection:
        [protocol] = server.protocols
        protocol.data_received(GET * 1000)
        answers = [await connection.answer() for _ in range(9)]
        assert {answer.status for answer in answers} == {200}
        assert answers[-1].headers["connection"] == "close"
        assert await connection.is_closed()


@on_a_loop
@pytest.mark.parametrize("target", [b"/classify", b"/classify?attention=0"])
async def test_leaving_with_another_request_in_line_cancels_the_one_that_is_being_answered(target: bytes) -> None:
    async with listening() as server:
        server.app.engine.gate.clear()
        async with server.connect() as connection:
            await connection.send(post(png(1)).replace(b"/classify", target) + GET)
            while server.app.engine.waiting == 0:
                await asyncio.sleep(0.001)
        while server.app.metric("vit_cancelled_total") == 0:
            await asyncio.sleep(0.001)
        assert server.app.engine.cancelled == 1
        assert server.app.metric("vit_requests_total", endpoint="/classify", code="499") == 1
        assert server.app.metric("vit_rejected_total", reason="internal_error") == 0
        assert service_in(server.app).limiter.in_use == 0


@on_a_loop
async def test_a_caller_that_pipelines_and_leaves_gives_its_place_back() -> None:
    async with listening(queue_size=2) as server:
        async with server.connect() as connection:
            server.app.engine.gate.clear()
            await connection.send(post(png(1)) + post(png(2)))
            while server.app.engine.waiting == 0:
                await asyncio.sleep(0.001)
        server.app.engine.gate.set()
        async with asyncio.timeout(PATIENCE):
            while service_in(server.app).limiter.in_use or server.state.tasks:
                await asyncio.sleep(0.001)
        assert server.app.metric("vit_inflight_requests") == 0


@on_a_loop
@pytest.mark.parametrize("endless", [b"X-A: b\r\n", b"a" * 1000], ids=["headers", "one header"])
async def test_a_head_without_end_is_refused(endless: bytes) -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + (b"" if b"\r" in endless else b"X-A: "))
        sent = 0
        while not connection.reader._buffer and sent < 10 << 20:  # type: ignore[attr-defined]
            await connection.send(endless * 10)
            sent += len(endless) * 10
            await asyncio.sleep(0)
        assert sent < 1 << 20
        answer = await connection.answer()
        assert (answer.status, answer.code) == (400, "malformed_request")


@on_a_loop
async def test_a_large_head_below_the_bound_is_fine() -> None:
    head = GET[:-2] + b"".join(b"X-%d: %s\r\n" % (i, b"a" * 900) for i in range(60)) + b"\r\n"
    async with listening() as server, server.connect() as connection:
        for _ in range(3):
            await connection.send(head)
            assert (await connection.answer()).status == 200


@on_a_loop
@pytest.mark.parametrize(("size", "status"), [(64 << 10, 200), ((64 << 10) + 1, 400)])
async def test_a_head_may_have_64_kib_and_no_byte_more(size: int, status: int) -> None:
    unfinished = GET[:-2] + b"X: "
    async with Wire() as wire:
        await wire.send(unfinished + b"a" * (size - len(unfinished)))
        await wire.send(b"\r\n\r\n")
        await wire.settle()
        assert wire.answers.statuses == [status]


@on_a_loop
@pytest.mark.parametrize(
    ("start", "endless"),
    [(b"0\r\n", b"X-Trailer: a\r\n" * 100), (b"1;", b"extension" * 100), (b"5\r\nabcde\r\n0\r\nX: ", b"a" * 1000)],
    ids=["trailers", "chunk extension", "one trailer"],
)
async def test_framing_without_end_is_refused(start: bytes, endless: bytes) -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(post(start, "Transfer-Encoding: chunked", length=False))
        sent = 0
        while not connection.reader._buffer and sent < 10 << 20:  # type: ignore[attr-defined]
            await connection.send(endless)
            sent += len(endless)
            await asyncio.sleep(0)
        assert sent < 1 << 20
        answer = await connection.answer()
        assert (answer.status, answer.code) == (400, "malformed_request")
        assert service_in(server.app).limiter.in_use == 0


@on_a_loop
async def test_a_slow_body_is_408_and_closes() -> None:
    async with listening(request_timeout=0.1) as server, server.connect() as connection:
        await connection.send(post(png(1))[:-20])
        answer = await connection.answer()
        assert (answer.status, answer.code) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert service_in(server.app).limiter.in_use == 0
        await connection.send(png(1)[-20:])
        assert await connection.is_closed()


@on_a_loop
async def test_a_caller_that_asks_and_does_not_read_is_let_go() -> None:
    clock = Clock()

    def is_let_go() -> bool:
        clock.advance(STALL_SECONDS)  # again while the kernel still takes a few bytes
        return not server.state.connections and not server.state.tasks

    async with listening(clock) as server, server.connect() as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        [protocol] = server.protocols
        protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        asking = asyncio.create_task(connection.send(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 30))
        await until(lambda: any(not protocol.writable.is_set() for protocol in server.protocols))
        await until(is_let_go)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert server.app.metric("vit_inflight_requests") == 0


@on_a_loop
async def test_a_refused_caller_that_never_closes_loses_its_connection() -> None:
    clock = Clock()
    async with listening(clock) as server, server.connect() as connection:
        await connection.send(b"\x00\r\n")
        assert (await connection.answer()).status == 400
        assert len(server.protocols) == 1
        clock.advance(LINGER_SECONDS)
        await until(lambda: not server.protocols)


@on_a_loop
async def test_100_continue_is_sent_only_when_the_body_is_wanted() -> None:
    async with listening(max_upload_bytes=10_000) as server:
        async with server.connect() as connection:
            await connection.send(post(png(1), "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            assert (await connection.answer()).status == 100
            await connection.send(png(1))
            assert (await connection.answer()).status == 200
        async with server.connect() as connection:
            head = post(bytes(10_001), "Expect: 100-continue").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            await connection.send(head)
            answer = await connection.answer()
            assert (answer.status, answer.code) == (413, "upload_too_large")


@on_a_loop
@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
async def test_a_client_that_offers_another_protocol_is_answered_in_this_one(upgrade: str) -> None:
    """Java's HTTP client offers h2c with every request to a plain address."""
    headers = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk")
    async with listening() as server, server.connect() as connection:
        for red in (4, 6):
            for byte in post(png(red), *headers) if red == 6 else [post(png(red), *headers)]:
                await connection.send(bytes([byte]) if isinstance(byte, int) else byte)
            answer = await connection.answer()
            assert answer.status == 200
            assert json.loads(answer.body)["predictions"][0]["index"] == red
        offer = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + "\r\n".join([*headers, "", ""]).encode()
        await connection.send(offer * 3)
        for _ in range(3):
            assert (await connection.answer()).status == 200
        await connection.send(b"CONNECT x:443 HTTP/1.1\r\n\r\n")
        answer = await connection.answer()
        assert (answer.status, answer.code) == (405, "method_not_allowed")
        assert await connection.is_closed()


@on_a_loop
async def test_an_offer_of_another_protocol_on_a_connection_that_is_to_close() -> None:
    headers = ("Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c", "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk")
    async with listening() as server, server.connect() as connection:
        padding = bytes(100_000)  # behind the picture's end, where decoders do not look
        await connection.send(post(png(4) + padding, *headers))
        answer = await connection.answer()
        assert answer.status == 200
        assert json.loads(answer.body)["predictions"][0]["index"] == 4
        assert answer.headers["connection"] == "close"
        assert await connection.is_closed()


@on_a_loop
async def test_an_old_client_gets_its_answer_and_a_closed_connection() -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert (await connection.answer()).status == 200
        assert await connection.is_closed()


@on_a_loop
async def test_an_absolute_url_is_understood() -> None:
    async with listening() as server:
        assert (await server.ask(b"GET http://x/healthz HTTP/1.1\r\nHost: x\r\n\r\n")).status == 200
