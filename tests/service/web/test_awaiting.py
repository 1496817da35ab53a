"""Work side by side ends together, and work whose caller left ends before anybody hears of it."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from service.errors import ClientDisconnected, InferenceFailed
from service.web.work import all_of, unless_disconnected
from tests.service.fakes import on_a_loop


async def returns(value: int, turns: int = 0) -> int:
    for _ in range(turns):
        await asyncio.sleep(0)
    return value


async def hangs(ended: list[str]) -> int:
    try:
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        ended.append("hangs")
    return 0


async def fails() -> int:
    raise InferenceFailed("this one")


async def silence() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def others() -> int:
    """How many tasks there are beside this one, when those that were cancelled have had their turn."""
    await asyncio.sleep(0)
    return len(asyncio.all_tasks()) - 1


@on_a_loop
async def test_results_are_in_order_whichever_ends_first() -> None:
    assert await all_of([returns(1, turns=3), returns(2), returns(3, turns=1)]) == [1, 2, 3]


@on_a_loop
async def test_when_one_fails_the_others_have_ended_and_its_own_error_is_raised() -> None:
    ended: list[str] = []
    with pytest.raises(InferenceFailed, match="this one"):
        await all_of([hangs(ended), fails(), hangs(ended)])
    assert ended == ["hangs"] * 2


@on_a_loop
async def test_nobody_watches_a_caller_whose_work_is_done() -> None:
    assert await unless_disconnected(silence, returns(5)) == 5
    with pytest.raises(InferenceFailed):
        await unless_disconnected(silence, fails())
    assert await others() == 0


@on_a_loop
async def test_the_work_of_a_caller_who_leaves_has_ended_when_that_is_raised() -> None:
    messages = iter([{"type": "http.request"}, {"type": "http.disconnect"}])

    async def receive() -> Message:
        return next(messages)

    ended: list[str] = []
    with pytest.raises(ClientDisconnected, match="the caller went away"):
        await unless_disconnected(receive, hangs(ended))
    assert (ended, await others()) == (["hangs"], 0)


@on_a_loop
async def test_what_else_becomes_of_a_body_is_raised_and_ends_the_work() -> None:
    async def receive() -> Message:
        raise ConnectionResetError("the socket")

    ended: list[str] = []
    with pytest.raises(ConnectionResetError, match="the socket"):
        await unless_disconnected(receive, hangs(ended))
    assert ended == ["hangs"]


@on_a_loop
async def test_whoever_cancels_the_wait_cancels_the_work() -> None:
    ended: list[str] = []
    waiting = asyncio.create_task(unless_disconnected(silence, hangs(ended)))
    for _ in range(3):
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended == ["hangs"]


@on_a_loop
async def test_a_connection_that_ends_ends_the_work_of_its_caller() -> None:
    left, ended = asyncio.get_running_loop().create_future(), list[str]()
    asyncio.get_running_loop().call_soon(left.set_result, None)
    with pytest.raises(ClientDisconnected, match="the caller went away"):
        await unless_disconnected(silence, hangs(ended), left)
    assert (ended, await others()) == (["hangs"], 0)


@on_a_loop
async def test_a_connection_that_ends_with_the_work_ends_nothing_else() -> None:
    left = asyncio.get_running_loop().create_future()

    async def leaves() -> int:
        left.set_result(None)
        return 5

    assert await unless_disconnected(silence, leaves(), left) == 5
    assert await others() == 0
