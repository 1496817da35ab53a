"""Callers that are refused and ask again at once wait a little, and nobody for long."""

from __future__ import annotations

import asyncio
from typing import cast
from unittest.mock import patch

import pytest

from service.web import refusal_pace
from service.web.lanes import Deadline
from service.web.pipeline import Pipeline
from service.web.refusal_pace import LONGEST_PAUSE, REFUSALS_PER_ANSWER, RefusalPace
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import pipeline_of, until
from tests.service.web.listening import GET, listening, post
from tests.service.web.wire import Clock


class Caller:
    def __init__(self) -> None:
        self.paused = False

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        assert self.paused
        self.paused = False


@pytest.fixture(autouse=True)
def credit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "MOST_CREDIT", 2)


def loop_of(clock: Clock) -> asyncio.AbstractEventLoop:
    return cast(asyncio.AbstractEventLoop, clock)


def test_each_answer_lets_some_be_refused_and_the_longest_waiting_are_heard_first() -> None:
    clock = Clock()
    pace, callers = RefusalPace(), [Caller() for _ in range(9)]
    for caller in callers:
        pace.refused(caller, loop_of(clock))
        pace.refused(caller, loop_of(clock))  # it had sent two requests; the second is refused all the same
    assert [caller.paused for caller in callers] == [False] + [True] * 8
    pace.answered()
    heard = 1 + min(2, REFUSALS_PER_ANSWER)
    assert [caller.paused for caller in callers] == [False] * heard + [True] * (9 - heard)


def test_a_pause_ends_by_itself_and_credit_does_not_pile_up() -> None:
    clock = Clock()
    pace, callers = RefusalPace(), [Caller() for _ in range(4)]
    for _ in range(100):
        pace.answered()
    for caller in callers:
        pace.refused(caller, loop_of(clock))
    assert [caller.paused for caller in callers] == [False, False, True, True]
    clock.advance(LONGEST_PAUSE - 0.01)
    assert [caller.paused for caller in callers] == [False, False, True, True]
    clock.advance(0.01)
    assert not any(caller.paused for caller in callers)
    pace.resume(callers[3])  # no harm


def test_after_a_quiet_time_a_thousand_are_refused_at_once_then_five_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    clock = Clock()
    pace, callers = RefusalPace(), [Caller() for _ in range(1010)]
    for caller in callers:
        pace.refused(caller, loop_of(clock))
    assert [caller.paused for caller in callers] == [False] * 1000 + [True] * 10
    pace.answered()
    assert [caller.paused for caller in callers] == [False] * 1005 + [True] * 5
    clock.advance(1)
    assert not any(caller.paused for caller in callers)


def test_a_pause_that_ended_with_an_answer_does_not_cut_the_next_one_short() -> None:
    clock = Clock()
    pace, callers = RefusalPace(), [Caller() for _ in range(5)]
    for caller in callers[:3]:
        pace.refused(caller, loop_of(clock))
    clock.advance(0.5)
    pace.answered()  # heard again, and one refusal is left
    for caller in callers[2:]:
        pace.refused(caller, loop_of(clock))
    pace.refused(callers[2], loop_of(clock))
    clock.advance(0.6)
    assert callers[2].paused


@on_a_loop
async def test_a_caller_out_of_credit_is_not_read_until_somebody_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "LONGEST_PAUSE", 1e6)
    async with listening(queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            await connection.send(post(png(1)))
            assert (await connection.answer()).status == 503  # by the application
            for _ in range(3):
                await connection.send(post(png(1)))
                assert (await connection.answer()).code == "queue_full"
            [protocol] = server.protocols
            assert protocol.flow.read_paused
            await connection.send(post(png(1)))
            assert (await server.ask(GET)).status == 200  # a probe is no answer that counts
            assert protocol.flow.read_paused
        assert (await server.ask(GET.replace(b"/healthz", b"/model"))).status == 200
        assert (await connection.answer()).status == 200


@on_a_loop
async def test_the_answer_to_a_second_request_of_the_same_bytes_does_not_end_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(refusal_pace, "MOST_CREDIT", 0)
    async with listening(Clock(), queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            await connection.send(post(png(1))[:-1])
            assert (await connection.answer()).status == 503  # by the application
            [protocol] = server.protocols
            protocol.data_received(png(1)[-1:])
            protocol._pace.resume(protocol)
            protocol.data_received(post(png(1)) * 2)
            assert [(await connection.answer()).code for _ in range(2)] == ["queue_full"] * 2
            assert protocol.flow.read_paused


@on_a_loop
async def test_who_is_refused_after_a_whole_body_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "MOST_CREDIT", 0)
    async with listening(Clock(), queue_size=1) as server, server.connect() as connection:
        [protocol] = server.protocols
        with pipeline_of(server.app).limiter.permit():
            protocol.data_received(post(png(1), "Origin: https://a.example"))  # the application looks at such heads
            assert (await connection.answer()).code == "queue_full"
            assert protocol.flow.read_paused
        server.app.engine.state = "failed"
        protocol._pace.resume(protocol)
        protocol.data_received(GET.replace(b"healthz", b"readyz"))
        assert (await connection.answer()).status == 503
        assert not protocol.flow.read_paused


@on_a_loop
async def test_the_time_of_a_request_counts_from_the_pause_that_it_lay_unread_in() -> None:
    clock = Clock()
    async with listening(clock, request_timeout=10) as server, server.connect() as connection:
        [protocol] = server.protocols
        started: list[float] = []
        deadline_of = Pipeline.deadline_of

        def spy(pipeline: Pipeline, at: float) -> Deadline:
            started.append(at - pipeline.clock())
            return deadline_of(pipeline, at)

        with patch.object(Pipeline, "deadline_of", spy):
            for seconds_later in (0.0, 0.19, 0.21, 60.0):
                protocol.pause()
                clock.advance(0.9)
                protocol.resume()
                clock.advance(seconds_later)
                started.clear()
                protocol.data_received(post(png(1)))
                assert (await connection.answer()).status == 200
                waited = 0.9 if seconds_later < 0.2 else 0.0
                assert -waited - 0.1 < max(started) <= -waited


@on_a_loop
async def test_a_pause_is_no_longer_than_a_quarter_of_a_requests_time() -> None:
    async with listening(request_timeout=2) as server:
        refuse_early = server.app.asgi.refuse_early
        assert refuse_early is not None
        assert refuse_early.pace._longest == 0.5


@on_a_loop
async def test_only_callers_for_whom_there_is_no_room_wait() -> None:
    async with listening() as server, server.connect() as connection:
        [protocol] = server.protocols
        for _ in range(4):
            await connection.send(post(png(1), path="/nowhere")[:-1])
            assert (await connection.answer()).status == 404
            protocol.data_received(png(1)[-1:])
            assert not protocol.flow.read_paused


@on_a_loop
async def test_a_caller_that_waits_is_heard_when_the_service_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "LONGEST_PAUSE", 1e6)
    async with listening(queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            for _ in range(4):
                await connection.send(post(png(1)))
                assert (await connection.answer()).status == 503
            [protocol] = server.protocols
            assert protocol.flow.read_paused
            protocol.shutdown()
            assert not protocol.flow.read_paused
            await connection.send(post(png(1)))
            assert (await connection.answer()).status == 503


@on_a_loop
async def test_one_that_is_cut_while_it_waits_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusal_pace, "LONGEST_PAUSE", 1e6)
    async with listening(queue_size=1) as server, server.connect() as connection:
        with pipeline_of(server.app).limiter.permit():
            for _ in range(4):
                await connection.send(post(png(1)))
                assert (await connection.answer()).status == 503
            [protocol] = server.protocols
            protocol.transport.abort()
            await until(lambda: not server.protocols)
            assert not protocol._pace._waiting
