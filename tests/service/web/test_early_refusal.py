"""While the service is full, a head that was refused before is refused again without the application."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from service.errors import QueueFull
from service.metrics.metrics import Metrics
from service.web.early_refusal import EarlyRefusal, RefusedHeads
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import pipeline_of
from tests.service.web.listening import GET, Answer, Connection, Listening, listening, post
from tests.service.web.wire import Clock


class Reached(BaseException):
    """The application was called."""


async def reached(*_: object) -> None:
    raise Reached


@asynccontextmanager
async def full(*headers: str, path: str = "/classify", **settings: Any) -> AsyncIterator[tuple[Listening, Connection]]:
    """A service without a free place, and the connection of a caller whom the application has refused."""
    async with listening(queue_size=1, **settings) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            await connection.send(post(png(1), *headers, path=path))
            assert (await connection.answer()).code == "queue_full"
            yield server, connection


async def without_application(server: Listening, connection: Connection, request: bytes) -> Answer | None:
    """The answer to a request that the application need not see; None if it is called."""
    [protocol] = server.protocols
    application, protocol.app = protocol.app, reached
    await connection.send(request)
    answer = await connection.answer()
    protocol.app = application
    return None if answer.status == 500 else answer


@on_a_loop
async def test_the_answer_is_the_same_as_the_applications() -> None:
    request = post(png(1), "X-Request-ID: mine", path="/classify?top_k=2")
    async with full(path="/classify?top_k=2") as (server, connection):
        await connection.send(request)
        by_application = await connection.answer()
        answer = await without_application(server, connection, request)
        assert answer is not None
        for one in (answer, by_application):
            one.headers.pop("date", None)
        assert answer == by_application
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["retry-after"] == "1"


@on_a_loop
async def test_it_is_counted_and_logged_as_every_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with full() as (server, connection):
        answer = await without_application(server, connection, post(png(1), "X-Request-ID: mine"))
        assert answer is not None
        assert server.app.metric("vit_requests_total", endpoint="/classify", code="503") == 2
        assert server.app.metric("vit_request_duration_seconds_count", endpoint="/classify") == 2
        assert server.app.metric("vit_rejected_total", reason="queue_full") == 2
        assert server.app.metric("vit_inflight_requests") == 0
    assert caplog.messages[-1] == "POST /classify 503 0.0 ms mine"


@on_a_loop
async def test_once_a_place_is_free_the_same_caller_is_answered() -> None:
    async with listening(queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            for _ in range(3):
                await connection.send(post(png(1)))
                assert (await connection.answer()).code == "queue_full"
        await connection.send(post(png(1)))
        assert (await connection.answer()).status == 200


@on_a_loop
@pytest.mark.parametrize(
    ("request_bytes", "status", "code"),
    [
        (post(png(1), "Authorization: Bearer wrong"), 401, "unauthorized"),
        (post(png(1)), 401, "unauthorized"),
        (post(png(1), "Authorization: Bearer right", path="/classify?top_k=0"), 422, "invalid_parameter"),
        (post(png(1), "Authorization: Bearer right", path="/nowhere"), 404, "not_found"),
        (post(png(1), "Authorization: Bearer right").replace(b"POST", b"PUT"), 405, "method_not_allowed"),
    ],
)
async def test_what_fails_an_earlier_check_is_told_so(request_bytes: bytes, status: int, code: str) -> None:
    async with full("Authorization: Bearer right", api_keys="right") as (_, connection):
        for _ in range(2):
            await connection.send(request_bytes)
            answer = await connection.answer()
            assert (answer.status, answer.code) == (status, code)


@on_a_loop
@pytest.mark.parametrize(
    "request_bytes", [post(png(1), "Origin: https://a.example"), post(png(1), "Expect: 100-continue")]
)
async def test_what_is_answered_in_another_form_goes_through_the_application(request_bytes: bytes) -> None:
    async with full() as (server, connection):
        assert await without_application(server, connection, request_bytes) is None


@on_a_loop
async def test_a_service_that_ends_or_has_no_model_answers_through_the_application() -> None:
    async with full() as (server, connection):
        server.app.engine.state = "failed"
        await connection.send(post(png(1)))
        assert (await connection.answer()).code == "engine_unavailable"
        server.app.engine.state = "ready"
        server.app.lifecycle.draining = True
        await connection.send(post(png(1)))
        assert (await connection.answer()).code == "draining"


@on_a_loop
async def test_a_caller_that_does_not_read_its_answers_waits_for_them() -> None:
    async with full() as (server, _):
        [protocol] = server.protocols
        protocol.flow.pause_writing()
        assert not protocol._is_refused_early()
        protocol.flow.resume_writing()
        assert protocol._is_refused_early()


@on_a_loop
async def test_of_requests_that_come_at_once_only_the_first_is_refused_without_the_application() -> None:
    async with full() as (server, connection):
        [protocol] = server.protocols
        with patch.object(protocol, "_refuse_early", wraps=protocol._refuse_early) as refuse_early:
            protocol.data_received(post(png(1)) * 5)  # thousands would hold the event loop
            assert [(await connection.answer()).code for _ in range(5)] == ["queue_full"] * 5
            assert refuse_early.call_count == 1


@on_a_loop
async def test_a_connection_on_which_refusals_came_at_once_is_kept_from_the_last_of_them() -> None:
    clock = Clock()
    async with listening(clock, queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            await connection.send(post(png(1)))
            assert (await connection.answer()).code == "queue_full"
            [protocol] = server.protocols
            protocol.data_received(post(png(1)) * 2)
            assert [(await connection.answer()).code for _ in range(2)] == ["queue_full"] * 2
            clock.advance(599)  # `listening` keeps idle connections for 600 s
            for _ in range(2):
                await connection.send(GET)
                assert (await connection.answer()).status == 200
                clock.advance(2)


def test_heads_are_remembered_within_bounds() -> None:
    heads = RefusedHeads()

    def scope(query: bytes, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
        named = {"method": "POST", "raw_path": b"/classify", "path": "/classify"}
        return {**named, "query_string": query, "headers": headers}

    long = (b"authorization", b"Bearer" + b" " * 3000 + b"key")
    heads.remember(scope(b"", long), "key")
    assert not heads._known

    for number in range(256):
        heads.remember(scope(b"top_k=%d" % number), None)
    assert len(heads._known) == 256
    heads.remember(scope(b"top_k=256"), None)
    longest = b"top_k=" + b"1" * (2048 - len(b"/classify?top_k="))
    heads.remember(scope(longest + b"1"), None)
    assert heads.find("POST", b"/classify?top_k=0", []) is None
    assert heads.find("POST", b"/classify?top_k=256", []) == ("/classify", None)
    assert len(heads._known) == 1
    heads.remember(scope(longest), "web")
    assert heads.find("POST", b"/classify?" + longest, []) == ("/classify", "web")


def test_its_span_is_told_what_was_asked_and_why_it_was_refused() -> None:
    scopes: list[Any] = []
    counted: list[Any] = []
    trace = SimpleNamespace(error_type=None)

    def begin(scope: object) -> SimpleNamespace:
        scopes.append(scope)
        return trace

    def check_room() -> None:
        raise QueueFull("no place")

    def count(*what: object, refusal: str, trace: object) -> None:
        counted.append((*what, refusal, trace))

    heads, metrics, tracer = RefusedHeads(), Metrics(), SimpleNamespace(begin=begin)
    head = {"method": "POST", "raw_path": b"/classify", "path": "/classify", "query_string": b"a=b", "headers": []}
    heads.remember(head, "web")
    refusal = EarlyRefusal(heads, check_room, cast(Any, count), metrics, cast(Any, tracer))
    problem = refusal("POST", b"/classify?a=b", [], "mine")
    assert problem is not None
    assert (problem.code, trace.error_type) == ("queue_full", "queue_full")
    assert counted == [("POST", "/classify", 503, 0.0, "mine", "web", "queue_full", trace)]
    assert scopes == [
        {
            "method": "POST", "path": "/classify", "query_string": b"a=b", "headers": [],
            "scheme": "http", "http_version": "1.1",
        }
    ]  # fmt: skip
    assert metrics.registry.get_sample_value("vit_rejected_total", {"reason": "queue_full"}) == 1
    assert refusal("POST", b"/classify?a=c", [], "mine") is None
