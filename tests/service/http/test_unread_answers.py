"""Answers that nobody reads take bounded memory."""

from __future__ import annotations

import asyncio
import socket
from contextlib import AsyncExitStack
from typing import cast

from service.http.connections import STALL_SECONDS, UnreadAnswers
from tests.service.fakes import on_a_loop
from tests.service.http.listening import GET, listening
from tests.service.http.wire import Clock, Transport
from tests.service.web.apps import until


def watched(answers: UnreadAnswers, *sizes: int) -> tuple[list[Transport], Clock]:
    clock, transports = Clock(), [Transport() for _ in sizes]
    for transport, size in zip(transports, sizes, strict=True):
        transport.unread = size
        answers.add(transport, cast(asyncio.AbstractEventLoop, clock))
    return transports, clock


def cut(transports: list[Transport]) -> list[bool]:
    return [transport.is_closing() for transport in transports]


def test_beyond_the_bound_those_are_cut_that_have_been_reading_for_longest() -> None:
    assert cut(watched(UnreadAnswers(100), 40, 30, 30)[0]) == [False] * 3
    assert cut(watched(UnreadAnswers(100), 40, 30, 31)[0]) == [True, False, False]
    assert cut(watched(UnreadAnswers(100), 40, 30, 30, 80)[0]) == [True, True, True, False]


def test_one_answer_may_be_larger_than_the_bound() -> None:
    assert cut(watched(UnreadAnswers(100), 10, 500)[0]) == [True, False]


def test_what_is_read_or_cut_takes_no_room() -> None:
    answers = UnreadAnswers(100)
    [first, second, third], clock = watched(answers, 60, 60, 30)
    assert cut([first, second, third]) == [True, False, False]
    answers.remove(second)
    answers.remove(second)  # no harm
    others, _ = watched(answers, 70)
    assert cut([second, third, *others]) == [False] * 3
    clock.advance(STALL_SECONDS)
    assert cut([second, third]) == [False, True]


@on_a_loop
async def test_of_callers_that_do_not_read_the_last_one_stays() -> None:
    answers = UnreadAnswers(1)
    async with listening(Clock()) as server, AsyncExitStack() as stack:
        for number in range(3):
            silent = await stack.enter_async_context(server.connect())
            silent.writer.transport.pause_reading()  # type: ignore[attr-defined]
            silent.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            count = min(number, 1) + 1
            await until(lambda count=count: len(server.protocols) == count)  # type: ignore[misc]
            [protocol] = [one for one in server.protocols if one.writable.is_set()]
            protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            protocol._unread_answers = answers
            protocol.transport.write(bytes(1 << 20))
            await until(lambda: [one.writable.is_set() for one in server.protocols] == [False])
            assert server.protocols == [protocol]
        assert (await server.ask(GET)).status == 200
