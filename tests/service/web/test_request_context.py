"""What the two outer layers tell of a request, each around an application that does as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.errors import EngineUnavailable, QueueFull, Unauthorized
from service.http.lifecycle import Lifecycle
from service.metrics.metrics import Metrics
from service.web import middleware
from service.web.admission import RefusalPace
from service.web.middleware import ProblemMiddleware, RequestContextMiddleware, request_context
from service.web.problems import problem_of
from tests.service.fakes import on_a_loop
from tests.service.web.apps import Clock

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b""}


class Trace:
    """A span that remembers what it was told."""

    response_header = (b"traceresponse", b"00-1-2-01")

    def __init__(self, exemplar: dict[str, str] | None) -> None:
        self.exemplar = exemplar
        self.error_type: str | None = None
        self.crashes: list[Exception] = []
        self.ended: list[tuple[Any, ...]] = []

    def crashed(self, error: Exception) -> None:
        self.crashes.append(error)

    def end(self, *what: object, request_id: str, key_name: str | None) -> None:
        self.ended.append((*what, request_id, key_name))


class Layers:
    """Both layers, with a tracer; `ask` sends one request."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Any], exemplar: dict[str, str] | None = None) -> None:
        self.metrics, self.clock, self.trace = Metrics(), Clock(), Trace(exemplar)
        self.sent: list[Message] = []
        self.begun: list[str] = []
        tracer: Any = SimpleNamespace(begin=self._begin)
        problems = ProblemMiddleware(answer, self.metrics, RefusalPace())
        self.asgi = RequestContextMiddleware(
            problems, self.metrics, ["/known"], Lifecycle(), tracer, clock=self.clock
        )  # fmt: skip

    def _begin(self, scope: Scope) -> Trace:
        self.begun.append(scope["path"])
        return self.trace

    async def ask(self, path: str = "/known") -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            self.sent.append(message)

        headers = [(b"x-request-id", b"mine"), (b"x-request-id", b"another")]
        await self.asgi({"type": "http", "method": "GET", "path": path, "headers": headers}, receive, send)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@on_a_loop
async def test_an_answer_carries_its_trace_which_hears_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(scope: Scope, _: Receive, send: Send) -> None:
        assert layers.metric("vit_inflight_requests") == 1
        request_context(scope).key_name = "name"
        layers.clock.now += 2
        await send(START)
        await send(END)

    remembered: list[tuple[object, ...]] = []
    layers = Layers(answer, {"trace_id": "1"})
    monkeypatch.setattr(layers.metrics.exemplars, "remember", lambda *each: remembered.append(each))
    await layers.ask()
    assert layers.sent[0]["headers"] == [(b"x-request-id", b"mine"), Trace.response_header]
    assert layers.trace.ended == [(200, "/known", 2.0, "mine", "name")]
    assert layers.trace.crashes == []
    assert layers.metric("vit_inflight_requests") == 0
    assert layers.metric("vit_requests_total", endpoint="/known", code="200") == 1
    assert layers.metric("vit_key_requests_total", key="name", code="200") == 1
    assert layers.metric("vit_request_duration_seconds_sum", endpoint="/known") == 2
    assert remembered == [("/known", 2.0, {"trace_id": "1"})]


@on_a_loop
async def test_a_request_that_nobody_answered_left_before() -> None:
    async def answer(_: Scope, __: Receive, ___: Send) -> None:
        """Say nothing."""

    layers = Layers(answer)
    await layers.ask("/other")
    assert layers.trace.ended == [(None, None, 0.0, "mine", None)]
    assert layers.metric("vit_cancelled_total") == 1
    assert layers.metric("vit_requests_total", endpoint="other", code="499") == 1


@on_a_loop
async def test_probes_have_no_trace_and_are_not_counted() -> None:
    async def answer(_: Scope, __: Receive, send: Send) -> None:
        assert layers.metric("vit_inflight_requests") == 0
        await send(START)
        await send(END)

    layers = Layers(answer)
    await layers.ask("/healthz")
    assert layers.begun == []
    assert layers.sent[0]["headers"] == [(b"x-request-id", b"mine")]


@on_a_loop
@pytest.mark.parametrize(
    ("error", "path", "held", "rejected", "status"),
    [
        (QueueFull("no place"), "/known", [], 1, 503),
        (EngineUnavailable("it is loading"), "/known", [3], 1, 503),
        (EngineUnavailable("it is loading"), "/readyz", [], 0, 503),
        (Unauthorized("no key"), "/metrics", [], 1, 401),
    ],
    ids=["refused", "no engine", "probe", "probe without a key"],
)
async def test_a_refusal_is_counted_and_only_a_missing_engine_is_waited_for(
    error: Exception, path: str, held: list[float], rejected: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def answer(_: Scope, __: Receive, ___: Send) -> None:
        raise error

    layers = Layers(answer)
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        patch.setattr(middleware, "HOLD_SECONDS", 3)
        await layers.ask(path)
    assert (slept, layers.sent[0]["status"]) == (held, status)
    code = problem_of(error).code
    assert layers.metric("vit_rejected_total", reason=code) == rejected
    assert layers.trace.error_type == (code if layers.begun else None)
    assert layers.trace.crashes == []


@on_a_loop
@pytest.mark.parametrize("begun", [False, True])
async def test_a_defect_is_seen_by_the_trace_and_the_log_and_answered_if_there_is_still_time(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_: Scope, __: Receive, send: Send) -> None:
        if begun:
            await send(START)
        raise ZeroDivisionError("of ours")

    layers = Layers(answer)
    await layers.ask()
    assert [message["status"] for message in layers.sent if "status" in message] == [200 if begun else 500]
    assert [str(error) for error in layers.trace.crashes] == ["of ours"]
    assert "request mine failed" in caplog.messages


@on_a_loop
async def test_what_is_no_request_is_passed_on() -> None:
    async def answer(scope: Scope, _: Receive, __: Send) -> None:
        raise ZeroDivisionError(scope["type"])

    layers = Layers(answer)
    unused: Any = None
    with pytest.raises(ZeroDivisionError, match="lifespan"):
        await layers.asgi({"type": "lifespan"}, unused, unused)
