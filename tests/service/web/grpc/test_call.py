"""One call, by a stand-in for the library's context: what is read, counted, logged and left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from service.errors import EngineUnavailable, QueueFull, UploadTooLarge
from service.settings import load_settings
from service.web import middleware
from service.web.api_keys import KeyGuard, KeyLimiter
from service.web.grpc import calls
from service.web.grpc.arrivals import Arrivals
from service.web.grpc.calls import Call, Calls
from service.web.pipeline import Pipelines
from service.web.request_log import Answered
from tests.service.fakes import on_a_loop
from tests.service.web.apps import App, Clock, pipelines_of


class Ended(Exception):
    """What the library raises when a call is ended."""


class Context:
    def __init__(self, message: object = b"") -> None:
        self.message = message
        self.trailers: tuple[tuple[str, str], ...] = ()
        self.aborted: list[Any] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("x-request-id", "mine"), ("x-request-id", "second"))

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5000"

    async def read(self) -> object:
        return self.message

    def set_trailing_metadata(self, trailers: list[tuple[str, str]]) -> None:
        self.trailers = tuple(trailers)

    async def abort(self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, str], ...]) -> None:
        self.trailers = trailers
        self.aborted += [code, details]
        raise Ended


def call(message: object) -> Call:
    return Call(Context(message), Arrivals(1, 8), 0.0, 10)


Method = Callable[[Pipelines, Call], Awaitable[bytes]]


class Counted:
    """Calls of an application whose clock stands still but for what a method adds."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.service = App(load_settings(), clock=self.clock)
        self.counted: list[tuple[Any, ...]] = []
        guard = KeyGuard((), KeyLimiter(0, 0), self.service.metrics)
        self.calls = Calls(pipelines_of(self.service), guard, self.count)

    def count(self, *what: Any, **more: Any) -> None:
        self.counted.append((*what, *more.values()))

    async def answer(self, method: Method) -> Context:
        context = Context()
        try:
            await self.calls.handler("Method", method, public=True).stream_unary(None, context)
        except Ended:
            assert context.aborted
        return context


@on_a_loop
async def test_a_message_has_the_form_of_a_requests_body() -> None:
    assert await call(b"abc").receive() == {"type": "http.request", "body": b"abc", "more_body": False}


@on_a_loop
async def test_a_question_may_have_64_kib() -> None:
    assert len(await call(bytes(65_536)).question()) == 65_536
    with pytest.raises(UploadTooLarge, match="65537 bytes: at most 65536"):
        await call(bytes(65_537)).question()


@on_a_loop
async def test_an_answer_has_its_requests_id_and_is_counted_with_its_time() -> None:
    counting = Counted()

    async def method(_: Pipelines, __: Call) -> bytes:
        counting.clock.now += 2
        assert counting.service.metric("vit_inflight_requests") == 1
        return b"answer"

    assert (await counting.answer(method)).trailers == (("x-request-id", "mine"),)
    path = "/inference.GRPCInferenceService/Method"
    answered = Answered("gRPC", path, 200, 2.0, "mine")
    assert counting.counted == [(answered, path, None)]
    assert counting.service.metric("vit_inflight_requests") == 0


@on_a_loop
@pytest.mark.parametrize(
    ("error", "held", "logged"),
    [
        (EngineUnavailable("it is loading"), [3], []),
        (QueueFull("no place"), [], []),
        (ZeroDivisionError("of ours"), [], ["request mine failed"]),
    ],
    ids=["no engine", "refused", "defect"],
)
async def test_only_a_missing_engine_is_waited_for_and_only_defects_are_logged(
    error: Exception,
    held: list[float],
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def method(_: Pipelines, __: Call) -> bytes:
        raise error

    counting = Counted()
    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        patch.setattr(middleware, "HOLD_SECONDS", 3)
        context = await counting.answer(method)
    assert (slept, [record.message for record in caplog.records if record.name == calls.__name__]) == (held, logged)
    assert context.trailers[0] == ("x-request-id", "mine")
    assert len(context.aborted) == 2


@on_a_loop
async def test_a_context_that_does_not_end_a_refused_call_is_a_defect() -> None:
    class Silent(Context):
        async def abort(self, *_: object) -> None:
            """Go on, which grpcio never does."""

    async def method(_: Pipelines, __: Call) -> bytes:
        raise QueueFull("no place")

    with pytest.raises(AssertionError, match="goes on"):
        await Counted().calls.handler("Method", method, public=True).stream_unary(None, Silent())
