"""What the two outer layers tell of a request, each around an application that does as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from service.errors import EngineUnavailable, QueueFull, Unauthorized
from service.lifecycle import Lifecycle
from service.observe.metrics import Metrics
from service.web import middleware
from service.web.admission import RefusalPace
from service.web.middleware import ProblemMiddleware, RequestContextMiddleware, request_context
from service.web.problems import problem_of
from tests.service.fakes import on_a_loop
from tests.service.web.apps import Clock

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b""}


class Layers:
    """Both layers; `ask` sends one request."""

    def __init__(self, answer: Callable[[Scope, Receive, Send], Any]) -> None:
        self.metrics, self.clock = Metrics(), Clock()
        self.sent: list[Message] = []
        problems = ProblemMiddleware(answer, self.metrics, RefusalPace())
        self.asgi = RequestContextMiddleware(problems, self.metrics, ["/known"], Lifecycle(), clock=self.clock)

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
async def test_an_answered_request_is_measured() -> None:
    async def answer(scope: Scope, _: Receive, send: Send) -> None:
        assert layers.metric("vit_inflight_requests") == 1
        request_context(scope).key_name = "name"
        layers.clock.now += 2
        await send(START)
        await send(END)

    layers = Layers(answer)
    await layers.ask()
    assert layers.sent[0]["headers"] == [(b"x-request-id", b"mine")]
    assert layers.metric("vit_inflight_requests") == 0
    assert layers.metric("vit_requests_total", endpoint="/known", code="200") == 1
    assert layers.metric("vit_key_requests_total", key="name", code="200") == 1
    assert layers.metric("vit_request_duration_seconds_sum", endpoint="/known") == 2


@on_a_loop
async def test_a_request_that_nobody_answered_left_before() -> None:
    async def answer(_: Scope, __: Receive, ___: Send) -> None:
        """Say nothing."""

    layers = Layers(answer)
    await layers.ask("/other")
    assert layers.metric("vit_cancelled_total") == 1
    assert layers.metric("vit_requests_total", endpoint="other", code="499") == 1


@on_a_loop
async def test_probes_are_not_counted() -> None:
    async def answer(_: Scope, __: Receive, send: Send) -> None:
        assert layers.metric("vit_inflight_requests") == 0
        await send(START)
        await send(END)

    layers = Layers(answer)
    await layers.ask("/healthz")
    assert layers.sent[0]["headers"] == [(b"x-request-id", b"mine")]


@on_a_loop
@pytest.mark.parametrize(
    ("error", "path", "held", "rejected", "status"),
    [
        (QueueFull("no place"), "/known", [0], 1, 503),
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


@on_a_loop
@pytest.mark.parametrize("begun", [False, True])
async def test_a_defect_is_logged_and_answered_if_there_is_still_time(
    begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_: Scope, __: Receive, send: Send) -> None:
        if begun:
            await send(START)
        raise ZeroDivisionError("of ours")

    layers = Layers(answer)
    await layers.ask()
    assert [message["status"] for message in layers.sent if "status" in message] == [200 if begun else 500]
    assert "request mine failed" in caplog.messages


@on_a_loop
async def test_what_is_no_request_is_passed_on() -> None:
    async def answer(scope: Scope, _: Receive, __: Send) -> None:
        raise ZeroDivisionError(scope["type"])

    layers = Layers(answer)
    unused: Any = None
    with pytest.raises(ZeroDivisionError, match="lifespan"):
        await layers.asgi({"type": "lifespan"}, unused, unused)
