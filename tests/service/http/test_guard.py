"""The guard before uvicorn's protocol: time, sizes, the number of connections, and answers that
nobody reads.
"""

import asyncio
import gc
import json
import socket
import weakref
from contextlib import AsyncExitStack
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.http.connection import HEAD_SECONDS, STALL_SECONDS
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
def test_bytes_are_the_same_requests_however_they_are_cut(
    stream: list[bytes], places: list[int]
) -> None:
    data = b"".join(stream)
    edges = [0, *sorted({place % (len(data) + 1) for place in places} - {0, len(data)}), len(data)]
    whole, _, closed = asyncio.run(converse([data]))
    pieces, *_ = asyncio.run(converse([data[start:end] for start, end in pairwise(edges)]))
    if closed:  # what is pipelined before bytes that are no HTTP may be dropped with them
        assert isinstance(whole, list) and isinstance(pieces, list)
        assert whole == pieces[: len(whole)]
    else:
        assert pieces == whole


@on_a_loop
@pytest.mark.parametrize("place", range(OFFER.index(b"Upgrade: "), OFFER.index(b"Upgrade: ") + 9))
async def test_the_body_of_an_offer_that_comes_in_two_reads_is_no_request(place: int) -> None:
    stream = OFFER.partition(b"\r\n\r\n")[0].replace(b"75", b"%d" % len(GET)) + b"\r\n\r\n" + GET
    requests, statuses, closed = await converse([stream[:place], stream[place:]])
    assert (requests, statuses, closed) in (
        ([("POST", "/classify", GET)], [200], False),
        ([], [400], True),
    )


@on_a_loop
async def test_a_small_answer_is_one_packet() -> None:
    async with listening() as server:
        with socket.create_connection(("127.0.0.1", server.port)) as caller:
            for _ in range(20):
                caller.send(GET)
                answer = await asyncio.to_thread(caller.recv, 1 << 16)
                assert answer.endswith(b"}")


@on_a_loop
async def test_pipelined_requests_are_answered_in_their_order_and_few_are_parsed_ahead() -> None:
    async with listening() as server, server.connect() as connection:
        server.app.engine.gate.clear()
        await connection.send(b"".join(post(png(red)) for red in (1, 2, 3)) + GET * 20_000)
        await until(lambda: server.app.engine.waiting == 1)
        server.app.engine.gate.set()
        answers = [await connection.answer() for _ in range(200)]
    indices = [json.loads(answer.body)["predictions"][0]["index"] for answer in answers[:3]]
    assert indices == [1, 2, 3]


@on_a_loop
async def test_garbage_behind_a_waiting_request_does_not_take_its_answer() -> None:
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
async def test_a_broken_chunk_is_the_requests_own_400_and_frees_its_place(body: bytes) -> None:
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
async def test_parsing_ends_with_the_refusal_of_a_body_that_has_no_end(body: bytes) -> None:
    async with listening(api_keys="key") as server, server.connect() as connection:
        await connection.send(post(body, "Transfer-Encoding: chunked", length=False))
        assert (await connection.answer()).code == "unauthorized"
        exchange = server.guard.exchange
        assert exchange is not None
        parsed = exchange.framing
        await connection.send(body * 100)
        assert await connection.is_closed()
        assert exchange.framing == parsed


@on_a_loop
async def test_tiny_chunks_behind_a_head_that_is_refused_are_hardly_parsed() -> None:
    async with listening(api_keys="key") as server, server.connect() as connection:
        await connection.send(
            post(9000 * b"1\r\nx\r\n", "Transfer-Encoding: chunked", length=False)
        )
        assert (await connection.answer()).code == "unauthorized"
        exchange = server.guard.exchange
        assert exchange is not None
        assert exchange.framing < 2000


@on_a_loop
@pytest.mark.parametrize(("size", "status"), [(64 << 10, 200), ((64 << 10) + 1, 400)])
async def test_a_head_may_have_64_kib(size: int, status: int) -> None:
    async with listening() as server:
        head = GET[:-2] + b"X: " + b"a" * (size - len(GET) - 5) + b"\r\n\r\n"
        assert (await server.ask(head)).status == status


@on_a_loop
async def test_a_head_that_is_late_is_408_and_who_never_asks_is_closed() -> None:
    async with listening() as server, server.connect() as slow, server.connect() as silent:
        await slow.send(HALF_A_HEAD)
        await until(lambda: any(guard.head for guard in server.connections.open))
        pass_time(server, HEAD_SECONDS - 1)
        assert len(server.connections.open) == 2
        pass_time(server, HEAD_SECONDS + 1)
        assert (await slow.answer()).code == "request_timeout"
        assert await slow.is_closed()
        assert await silent.is_closed()


@on_a_loop
async def test_a_stalled_body_is_408_and_closes_and_holds_no_place() -> None:
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
async def test_after_a_refusal_a_small_body_is_read_to_its_end_and_the_connection_kept(
    size: int, framing: str, kept: bool
) -> None:
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
async def test_100_continue_is_sent_only_when_the_body_is_wanted() -> None:
    async with listening(max_upload_bytes=10_000) as server:
        for size, status in ((100, 100), (10_001, 413)):
            async with server.connect() as connection:
                await connection.send(post(bytes(size), "Expect: 100-continue")[:-size])
                assert (await connection.answer()).status == status


@on_a_loop
async def test_a_caller_that_asks_and_does_not_read_is_let_go() -> None:
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
async def test_no_request_begins_behind_unread_answer() -> None:
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
        service_in(server.app).receiving.capacity = 1 << 16
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
        )
        await connection.send(LONG_ANSWER * 9)
        await until(
            lambda: server.app.metric("vit_requests_total") > 0 and not server.connections.open
        )


@on_a_loop
async def test_a_caller_that_leaves_the_last_bytes_of_its_last_answer_is_let_go() -> None:
    async with listening() as server, server.connect() as connection:
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 4096
        )
        await until(lambda: len(server.connections.open) == 1)
        guard = server.guard
        for form in [b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 100:
            if guard.transport.get_write_buffer_size():
                break
            await connection.send(form)
            await asyncio.sleep(0.01)
        await connection.send(FORMS["connection: close in another line"].sent)
        await until(guard.transport.is_closing)
        assert guard.drained is None
        pass_time(server, HEAD_SECONDS + 1)
        await until(lambda: not server.connections.open)


@on_a_loop
async def test_a_last_answer_is_not_lost_to_a_caller_that_still_sends() -> None:
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
async def test_a_caller_that_has_reset_the_connection_that_refuses_it_is_no_error(
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
async def test_a_connection_is_freed_without_the_garbage_collector(
    sent: bytes, status: int | None
) -> None:
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


def test_who_closes_its_sending_side_is_taken_for_one_that_left(
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
async def test_leaving_cancels_the_request_that_is_being_answered() -> None:
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
async def test_a_large_body_is_read_whole_however_slowly_the_application_takes_it(
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
async def test_who_has_waited_longest_for_a_request_makes_room() -> None:
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
async def test_who_is_being_answered_makes_no_room_and_one_more_is_503() -> None:
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
async def test_a_refused_caller_that_never_closes_makes_room() -> None:
    async with listening(max_connections=1) as server, server.connect() as refused:
        await refused.send(b"\x00\r\n")
        assert (await refused.answer()).status == 400
        assert (await server.ask(GET)).status == 200


@on_a_loop
async def test_a_caller_that_goes_on_to_send_a_refused_body_makes_room() -> None:
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
async def test_a_body_that_is_on_its_way_for_longest_makes_room_and_is_told_so() -> None:
    async with listening(max_connections=1) as server, server.connect() as crawler:
        await crawler.send(post(bytes(100))[:-50])
        await until(lambda: server.app.metric("vit_inflight_requests") == 1)
        assert (await server.ask(post(png(1)))).status == 200
        answer = await crawler.answer()
        assert (answer.code, answer.headers["connection"]) == ("request_timeout", "close")
    assert server.app.metric("vit_requests_total", endpoint="/classify", code="408") == 1
    assert server.app.metric("vit_cancelled_total") == 0
