"""Limits of connections: time, sizes, number, and unread answers."""

import asyncio
import gc
import json
import re
import socket
import weakref
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.http.connection import HEADER_SECONDS, LAST_STALL_SECONDS, STALL_SECONDS
from service.http.exchange import DISCARDED_BYTES
from tests.service.fakes import on_a_loop, png, until
from tests.service.http.listening import GET, Connection, Listening, listening, post
from tests.service.http.raw_forms import FORMS
from tests.service.http.wire import Wire
from tests.service.web.apps import service_in

LONG_ANSWER = GET.replace(b"/healthz", b"/docs/swagger-ui-bundle.js")
HALF_A_HEAD = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
OFFER = FORMS["an offer of h2c with a body"].sent
SHORT = [form.sent for form in FORMS.values() if len(form.sent) < 1000 and form.sent != OFFER]


def pass_time(server: Listening, seconds: float) -> None:
    for connection in [*server.connections.open, *server.connections.ending]:
        connection.check(asyncio.get_running_loop().time() + seconds)


async def converse(pieces: list[bytes]) -> tuple[object, ...]:
    wire = Wire()
    for piece in pieces:
        await wire.send(piece)
    assert wire.statuses.count(200) == len(wire.requests)
    return wire.requests, wire.statuses, wire.socket.closed


@settings(max_examples=150)
@given(
    st.lists(st.one_of(st.sampled_from(SHORT), st.binary(max_size=9)), max_size=4),
    st.lists(st.integers(0, 2000)),
)
@example([b"CONNECT x:443 HTTP/1.1\r\n\r\n", GET], [21])
def test_cuts_of_the_stream_do_not_matter(stream: list[bytes], places: list[int]) -> None:
    data = b"".join(stream)
    edges = [0, *sorted({place % (len(data) + 1) for place in places} - {0, len(data)}), len(data)]
    whole, _, closed = asyncio.run(converse([data]))
    pieces, *_ = asyncio.run(converse([data[start:end] for start, end in pairwise(edges)]))
    if closed:  # invalid bytes may drop earlier pipelined requests
        assert isinstance(whole, list) and isinstance(pieces, list)
        assert whole == pieces[: len(whole)]
    else:
        assert pieces == whole


@on_a_loop
@pytest.mark.parametrize("place", range(OFFER.index(b"Upgrade: "), OFFER.index(b"Upgrade: ") + 9))
async def test_an_upgrade_body_is_no_request(place: int) -> None:
    headers = OFFER.partition(b"\r\n\r\n")[0]
    headers = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(GET), headers)
    stream = headers + b"\r\n\r\n" + GET
    requests, statuses, closed = await converse([stream[:place], stream[place:]])
    assert (requests, statuses, closed) in (
        ([("POST", "/classify", GET)], [200], False),
        ([], [400], True),
    )


@on_a_loop
async def test_chunks_are_read_wherever_they_are_cut() -> None:
    body = b"\r\n0\r\n\r\n" + bytes(range(256))
    lines = [b"2", b"0A", b"00000003;a=b", b"1f", b"000000000001"]
    chunks = b""
    at = 0
    for line in lines:
        size = int(line.partition(b";")[0], 16)
        chunks += b"%b\r\n%b\r\n" % (line, body[at : at + size])
        at += size
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    stream = head + chunks + b"%x\r\n%b\r\n0\r\nX: 1\r\n\r\n" % (len(body) - at, body[at:]) + GET
    whole = await converse([stream])
    requests = [("POST", "/", body), ("GET", "/healthz", b"")]
    assert whole == (requests, [200, 200], False)
    for place in range(len(head), len(stream)):
        assert await converse([stream[:place], stream[place:]]) == whole


@on_a_loop
async def test_a_small_answer_is_one_packet() -> None:
    async with listening() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as caller:
            for _ in range(20):
                caller.send(GET)
                answer = await asyncio.to_thread(caller.recv, 1 << 16)
                assert answer.endswith(b"}")


@on_a_loop
async def test_pipelined_requests_keep_their_order() -> None:
    async with listening() as server, server.connect() as connection:
        server.app.engine.gate.clear()
        await connection.send(b"".join(post(png(red)) for red in (1, 2, 3)) + GET * 20_000)
        await until(lambda: server.app.engine.waiting == 1)
        server.app.engine.gate.set()
        answers = [await connection.answer() for _ in range(200)]
    indices = [json.loads(answer.body)["predictions"][0]["index"] for answer in answers[:3]]
    assert indices == [1, 2, 3]


@on_a_loop
async def test_garbage_spares_earlier_requests() -> None:
    async with listening() as server, server.connect() as connection:
        server.app.engine.gate.clear()
        await connection.send(post(png(5)) + b"\x00garbage\r\n\r\n")
        await until(lambda: server.app.engine.waiting == 1)
        await connection.send(b"more garbage")
        server.app.engine.gate.set()
        answer = await connection.answer()
        assert json.loads(answer.body)["predictions"][0]["index"] == 5
        assert (await connection.answer()).status == 400
        assert await connection.is_closed()


@on_a_loop
@pytest.mark.parametrize(
    "body", [b"zz\r\nx\r\n0\r\n\r\n", b"1\r\nxx\r\n0\r\n\r\n", b"5\r\nabcde\r\nq"]
)
async def test_broken_chunk_fails_its_request(body: bytes) -> None:
    async with listening(queue_size=1) as server, server.connect() as connection:
        await connection.send(
            post(b"", "Transfer-Encoding: chunked", "X-Request-ID: mine", length=False)
        )
        await until(lambda: server.app.metric("vit_inflight_requests") == 1)
        await connection.send(body)
        answer = await connection.answer()
        assert (answer.code, answer.headers["x-request-id"]) == ("malformed_request", "mine")
        assert await connection.is_closed()
        assert server.app.metric("vit_requests_total", endpoint="/classify", code="400") == 1
        assert server.app.metric("vit_cancelled_total") == 0
        assert (await server.ask(post(png(1)))).status == 200


@on_a_loop
@pytest.mark.parametrize("body", [4 * b"1\r\nx\r\n", 40 * b"ff\r\n" + b"x" * 255 + b"\r\n"])
async def test_a_refusal_ends_the_parsing(body: bytes) -> None:
    async with listening(api_keys="key") as server, server.connect() as connection:
        await connection.send(post(body, "Transfer-Encoding: chunked", length=False))
        assert (await connection.answer()).code == "unauthorized"
        exchange = server.guard.exchange
        assert exchange is not None and exchange.chunks is not None
        parsed = exchange.chunks.framing_bytes
        await connection.send(body * 100)
        assert await connection.is_closed()
        assert exchange.chunks.framing_bytes == parsed


@on_a_loop
async def test_refused_tiny_chunks_are_discarded() -> None:
    async with listening(api_keys="key") as server, server.connect() as connection:
        await connection.send(
            post(9000 * b"1\r\nx\r\n", "Transfer-Encoding: chunked", length=False)
        )
        assert (await connection.answer()).code == "unauthorized"
        exchange = server.guard.exchange
        assert exchange is not None and exchange.chunks is not None
        assert exchange.chunks.framing_bytes < 2000


@on_a_loop
async def test_many_tiny_chunks_name_a_remedy() -> None:
    async with listening() as server:
        body = 300 * b"1\r\nx\r\n" + b"0\r\n\r\n"
        answer = await server.ask(post(body, "Transfer-Encoding: chunked", length=False))
        assert (answer.status, "send larger chunks" in json.loads(answer.body)["detail"]) == (
            400,
            True,
        )


@on_a_loop
@pytest.mark.parametrize(("size", "status"), [(64 << 10, 200), ((64 << 10) + 1, 400)])
async def test_a_head_may_have_64_kib(size: int, status: int) -> None:
    async with listening() as server:
        head = GET[:-2] + b"X: " + b"a" * (size - len(GET) - 5) + b"\r\n\r\n"
        assert (await server.ask(head)).status == status


@on_a_loop
async def test_late_request_headers_get_408() -> None:
    async with listening() as server, server.connect() as slow, server.connect() as silent:
        await slow.send(HALF_A_HEAD)
        await until(
            lambda: any(guard.request_headers.received for guard in server.connections.open)
        )
        pass_time(server, HEADER_SECONDS - 1)
        assert len(server.connections.open) == 2
        pass_time(server, HEADER_SECONDS + 1)
        assert (await slow.answer()).code == "request_timeout"
        assert await slow.is_closed()
        assert await silent.is_closed()


@on_a_loop
async def test_stalled_body_gets_408() -> None:
    async with (
        listening(request_timeout=0.1, queue_size=1) as server,
        server.connect() as connection,
    ):
        await connection.send(post(png(1))[:-20])
        assert (await server.ask(post(png(2)))).status == 200
        answer = await connection.answer()
        assert (answer.code, answer.headers["connection"]) == ("request_timeout", "close")
        await connection.send(png(1)[-20:])
        assert await connection.is_closed()


@on_a_loop
@pytest.mark.parametrize(
    ("size", "framing", "kept"),
    [(5000, "", True), (DISCARDED_BYTES + 1, "", False), (5000, "Expect: 100-continue", False)],
)
async def test_small_refusals_keep_the_connection(size: int, framing: str, kept: bool) -> None:
    async with (
        listening(queue_size=1, max_upload_bytes=1 << 30) as server,
        server.connect() as connection,
    ):
        with service_in(server.app).limiter.permit():
            sent = post(bytes(size), *[framing] * bool(framing))
            await connection.send(sent[:-size] if framing else sent)
            answer = await connection.answer()
        assert (answer.code, "connection" in answer.headers) == ("queue_full", not kept)
        if kept:
            await connection.send(GET)
            assert (await connection.answer()).status == 200
        else:
            assert await connection.is_closed()


@on_a_loop
async def test_continue_waits_for_the_application() -> None:
    async with listening(max_upload_bytes=10_000) as server:
        for size, status in ((100, 100), (10_001, 413)):
            async with server.connect() as connection:
                await connection.send(post(bytes(size), "Expect: 100-continue")[:-size])
                assert (await connection.answer()).status == status


@on_a_loop
async def test_client_that_never_reads_is_dropped() -> None:
    def is_let_go() -> bool:
        pass_time(server, STALL_SECONDS + 1)  # again while the kernel still takes a few bytes
        return not server.connections.open

    async with listening() as server, server.connect() as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
        )
        asking = asyncio.create_task(
            connection.send(GET.replace(b"/healthz", b"/openapi.json") * 300)
        )
        await until(lambda: server.guard.transport.get_write_buffer_size() > 1 << 16)
        pass_time(server, STALL_SECONDS - 1)
        assert server.connections.open
        await until(is_let_go)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: server.app.metric("vit_inflight_requests") == 0)


@on_a_loop
async def test_unread_answer_does_not_delay_a_stop() -> None:
    async with listening() as server, server.connect() as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(LONG_ANSWER * 9)
        await until(lambda: len(server.connections.open) == 1 and server.guard.drained is not None)
        pass_time(server, LAST_STALL_SECONDS + 1)
        server.connections.ending_since = asyncio.get_running_loop().time()
        pass_time(server, LAST_STALL_SECONDS - 1)
        assert server.connections.open
        pass_time(server, LAST_STALL_SECONDS + 1)
        await until(lambda: not server.connections.open)


@on_a_loop
async def test_no_request_passes_an_unread_answer() -> None:
    async with listening() as server, server.connect() as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await connection.send(LONG_ANSWER * 9)
        await until(lambda: len(server.connections.open) == 1 and server.guard.drained is not None)
        for _ in range(30):
            await asyncio.sleep(0)
        assert server.guard.request is None
        connection.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert [(await connection.answer()).status for _ in range(9)] == [200] * 9


@on_a_loop
async def test_answer_without_room_for_it_is_cut() -> None:
    async with listening() as server, server.connect() as connection:
        service_in(server.app).byte_budget.capacity = 1 << 16
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
        )
        await connection.send(LONG_ANSWER * 9)
        await until(
            lambda: server.app.metric("vit_requests_total") > 0 and not server.connections.open
        )


@on_a_loop
async def test_unread_bytes_hold_no_connection() -> None:
    async with listening() as server, server.connect() as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
        )
        await until(lambda: len(server.connections.open) == 1)
        guard = server.guard
        # A page is shorter than the buffer at which the connection waits for its reader.
        for form in [b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 200:
            if guard.transport.get_write_buffer_size():
                break
            await connection.send(form)
            await asyncio.sleep(0.01)
        assert guard.transport.get_write_buffer_size() > 0
        await connection.send(FORMS["connection: close in another line"].sent)
        await until(guard.transport.is_closing)
        assert guard.drained is None
        pass_time(server, HEADER_SECONDS + 1)
        await until(lambda: not server.connections.open)


@on_a_loop
async def test_sending_client_gets_its_last_answer() -> None:
    async with listening() as server, server.connect() as connection:
        await connection.send(FORMS["connection: close in another line"].sent + GET * 20_000)
        await until(lambda: len(server.connections.open) == 1)
        guard = server.guard
        assert (await connection.answer()).status == 200
        assert (
            not guard.transport.is_closing()
        )  # a socket that is closed before all is read is reset
        assert await connection.is_closed()


@on_a_loop
async def test_a_reset_in_a_refusal_is_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire()
    monkeypatch.setattr(wire.socket, "write_eof", socket.socket().getpeername)
    await wire.send(b"x\r\n\r\n")
    assert wire.statuses == [400]


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (GET, 200),
        (post(b"zz\r\n", "Transfer-Encoding: chunked", length=False), 400),
        (post(png(1))[:-9], None),
        (post(png(1)), None),
    ],
)
async def test_closed_connection_leaves_no_cycle(sent: bytes, status: int | None) -> None:
    async with listening() as server:
        server.app.engine.gate.clear()
        gc.disable()
        try:
            async with server.connect() as connection:
                await connection.send(sent)
                await until(lambda: len(server.connections.open) == 1)
                guard = weakref.ref(server.guard)
                if status:
                    assert (await connection.answer()).status == status
            await until(lambda: guard() is None)
        finally:
            gc.enable()


def test_half_closed_client_counts_as_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    uvloop = pytest.importorskip(
        "uvloop", reason="uvloop is not installed: it alone minds a write that comes too late"
    )

    async def half_close() -> None:
        async with listening() as server:
            for request in (post(png(1)), GET, post(b"no picture")) * 5:
                async with server.connect() as caller:
                    await caller.send(request)
                    caller.writer.write_eof()
                    await caller.reader.read()
            assert (await server.ask(GET)).status == 200

    uvloop.run(half_close())
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@on_a_loop
async def test_disconnect_cancels_the_request() -> None:
    async with listening() as server:
        server.app.engine.gate.clear()
        async with server.connect() as connection:
            await connection.send(post(png(1)) + GET)
            await until(lambda: server.app.engine.waiting == 1)
        await until(lambda: server.app.metric("vit_cancelled_total") == 1)
        assert server.app.engine.cancelled == 1
        assert service_in(server.app).limiter.in_use == 0
        assert not server.connections.open


@on_a_loop
@pytest.mark.parametrize("framing", ["Content-Length: 20000000", "Transfer-Encoding: chunked"])
async def test_a_slow_application_gets_all_bytes(
    framing: str,
) -> None:
    body = bytes(20_000_000)
    sent = (
        body
        if "Length" in framing
        else b"".join(b"4e20\r\n" + bytes(20_000) + b"\r\n" for _ in range(1000))
    )
    async with (
        listening(max_upload_bytes=30_000_000, request_timeout=60) as server,
        server.connect() as connection,
    ):
        sending = asyncio.create_task(
            connection.send(post(sent + b"0\r\n\r\n" * (sent != body), framing, length=False))
        )
        assert (await connection.answer()).code == "unsupported_media_type"
        await sending
        await connection.send(GET)
        assert (await connection.answer()).status == 200


# As many connections as there may be


async def connected(server: Listening, stack: AsyncExitStack, sent: bytes) -> Connection:
    count = len(server.connections.open)
    connection = await stack.enter_async_context(server.connect())
    await connection.send(sent)
    await until(lambda: len(server.connections.open) == count + 1)
    return connection


@on_a_loop
async def test_longest_idle_connection_is_evicted() -> None:
    async with listening(max_connections=3) as server, AsyncExitStack() as stack:
        regular = await connected(server, stack, GET)
        assert (await regular.answer()).status == 200
        first = await connected(server, stack, HALF_A_HEAD)
        second = await connected(server, stack, HALF_A_HEAD)
        await regular.send(GET)
        assert (await regular.answer()).status == 200
        assert (await server.ask(GET)).status == 200
        assert await first.is_closed()
        for connection, sent in ((second, b"x\r\n\r\n"), (regular, GET)):
            await connection.send(sent)
            assert (await connection.answer()).status == 200


@on_a_loop
async def test_busy_connections_are_not_evicted() -> None:
    async with listening(max_connections=1) as server, server.connect() as busy:
        server.app.engine.gate.clear()
        await busy.send(post(png(1)))
        await until(lambda: server.app.engine.waiting == 1)
        async with server.connect() as refused, server.connect() as another:
            for connection in (refused, another):
                answer = await connection.answer()
                assert (answer.code, answer.headers["retry-after"]) == ("receiving_full", "1")
                assert await connection.is_closed()
            assert server.app.metric("vit_rejected_total", reason="receiving_full") == 2
        server.app.engine.gate.set()
        assert (await busy.answer()).status == 200


@on_a_loop
async def test_refused_idle_connection_is_evicted() -> None:
    async with listening(max_connections=1) as server, server.connect() as refused:
        await refused.send(b"\x00\r\n")
        assert (await refused.answer()).status == 400
        assert (await server.ask(GET)).status == 200


@on_a_loop
async def test_sender_of_a_refused_body_is_evicted() -> None:
    async with listening(max_connections=2) as server, AsyncExitStack() as stack:
        sending = await connected(
            server, stack, post(b"", "Content-Length: 5000000", path="/nope", length=False)
        )
        assert (await sending.answer()).status == 404
        for _ in range(3):
            idle = await stack.enter_async_context(server.connect())
            await idle.send(GET)
            assert (await idle.answer()).status == 200
            assert len(server.connections.open) <= 2
        assert await sending.is_closed()


@on_a_loop
async def test_an_idle_connection_is_kept_as_set() -> None:
    async with listening(keep_alive=620) as server, server.connect() as balancer:
        await balancer.send(GET)
        await balancer.answer()
        pass_time(server, 619)
        await balancer.send(GET)
        assert (await balancer.answer()).status == 200
        pass_time(server, 621)
        assert await balancer.is_closed()


@on_a_loop
async def test_http_1_0_is_told_that_it_may_go_on() -> None:
    async with listening() as server:
        answer = await server.ask(b"GET /healthz HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n")
        assert answer.headers["connection"] == "keep-alive"


@on_a_loop
@pytest.mark.parametrize(
    ("sent", "remedy"),
    [
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", "call http://"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "this is HTTP/2: speak HTTP/1.1 to this port"),
        (b"PROXY TCP4 1.2.3.4 5.6.7.8 1 2\r\n" + GET, "turn it off in the load balancer"),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c", "turn it off in the load balancer"),
        (b"GET /classify?model=a b HTTP/1.1\r\nHost: x\r\n\r\n", "percent-encode spaces"),
        (b"GET /labels?x=\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", "percent-encode spaces"),
        (b"GET /heads/\xe9 HTTP/1.1\r\nHost: x\r\n\r\n", "send the parameter as a form field"),
        (b"GET /labels HTTPS/1.1\r\nHost: x\r\n\r\n", "this is not HTTP/1.1: "),
        (b"post /classify HTTP/1.1\r\nHost: x\r\n\r\n", "methods are upper case: POST"),
    ],
)
async def test_other_protocol_is_named(sent: bytes, remedy: str) -> None:
    async with listening() as server:
        assert remedy in json.loads((await server.ask(sent)).body)["detail"]


@on_a_loop
async def test_slowest_body_is_evicted_with_408() -> None:
    async with listening(max_connections=1) as server, server.connect() as crawler:
        await crawler.send(post(bytes(100))[:-50])
        await until(lambda: server.app.metric("vit_inflight_requests") == 1)
        assert (await server.ask(post(png(1)))).status == 200
        answer = await crawler.answer()
        assert (answer.code, answer.headers["connection"]) == ("request_timeout", "close")
    assert server.app.metric("vit_requests_total", endpoint="/classify", code="408") == 1
    assert server.app.metric("vit_cancelled_total") == 0
