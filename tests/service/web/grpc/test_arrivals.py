"""Messages arrive a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from service.errors import ReceivingFull, RequestTimeout
from service.settings import load_settings
from service.web.grpc.arrivals import Arrivals
from tests.service.fakes import on_a_loop
from tests.service.web.apps import settle


async def arrive(arrivals: Arrivals, come: asyncio.Event, begun: list[int], number: int, caller: str = "one") -> int:
    async with arrivals.turn(caller):
        begun.append(number)
        await come.wait()
    return number


@on_a_loop
async def test_so_many_arrive_at_the_same_time_and_the_others_in_their_order() -> None:
    arrivals, begun = Arrivals(2, 8, grace=1000), list[int]()
    come = [asyncio.Event() for _ in range(4)]
    tasks = [asyncio.create_task(arrive(arrivals, event, begun, number)) for number, event in enumerate(come)]
    await settle()
    assert begun == [0, 1]
    come[1].set()
    await settle()
    assert begun == [0, 1, 2]
    for event in come:
        event.set()
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3]


@on_a_loop
async def test_a_slow_one_gives_way_only_when_another_waits() -> None:
    arrivals, begun, come = Arrivals(1, 8, grace=0), list[int](), asyncio.Event()
    slow = asyncio.create_task(arrive(arrivals, asyncio.Event(), begun, 0))
    await settle()
    assert not slow.done()
    come.set()
    assert await arrive(arrivals, come, begun, 1) == 1
    with pytest.raises(RequestTimeout, match="too slowly"):
        await slow


@on_a_loop
async def test_one_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    arrivals, begun, come = Arrivals(1, 8, grace=1000), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(arrive(arrivals, come, begun, number)) for number in range(3)]
    await settle()
    tasks[0].cancel()
    tasks[1].cancel()
    come.set()
    assert await tasks[2] == 2


@on_a_loop
async def test_an_error_of_the_message_itself_is_no_giving_way() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        async with Arrivals(1, 8).turn("one"):
            raise TimeoutError("its own")


class Timer:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@on_a_loop
async def test_a_message_is_looked_at_sixteen_times_in_its_grace_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[tuple[float, Callable[[], None]]] = []
    timers: list[Timer] = []

    def call_later(delay: float, look: Callable[[], None]) -> Timer:
        looks.append((delay, look))
        timers.append(Timer())
        return timers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", call_later)
        async with Arrivals(1, 8, grace=8).turn("one"):
            looks[0][1]()
            looks[1][1]()
    assert [delay for delay, _ in looks] == [0.5, 0.5, 0.5]
    assert timers[-1].cancelled


@on_a_loop
async def test_a_caller_with_many_calls_holds_up_itself_and_no_other() -> None:
    arrivals, begun, come, never = Arrivals(2, 8, grace=1000), list[int](), asyncio.Event(), asyncio.Event()
    crowd = [asyncio.create_task(arrive(arrivals, never, begun, number, "crowd")) for number in range(6)]
    await settle()
    other = asyncio.create_task(arrive(arrivals, come, begun, 9, "other"))
    await settle()
    crowd[0].cancel()
    await settle()
    assert begun == [0, 1, 9]
    come.set()
    assert await other == 9
    for task in crowd:
        task.cancel()
    assert {type(end) for end in await asyncio.gather(*crowd, return_exceptions=True)} == {asyncio.CancelledError}
    assert (arrivals._held, arrivals._waiting) == ({}, {})


@on_a_loop
async def test_a_slow_message_does_not_give_way_to_a_caller_with_more_turns() -> None:
    arrivals, begun, come, never = Arrivals(3, 8, grace=0), list[int](), asyncio.Event(), asyncio.Event()
    slow = asyncio.create_task(arrive(arrivals, come, begun, 9, "slow"))
    await settle()
    crowd = [asyncio.create_task(arrive(arrivals, never, begun, number, "crowd")) for number in range(8)]
    for ended in crowd[:-2]:
        with pytest.raises(RequestTimeout):
            await ended
    come.set()
    assert await slow == 9
    for task in crowd:
        task.cancel()


@on_a_loop
async def test_of_too_many_that_wait_the_newest_of_the_largest_crowd_is_refused() -> None:
    arrivals, begun, never = Arrivals(1, 3, grace=1000), list[int](), asyncio.Event()
    crowd = [asyncio.create_task(arrive(arrivals, never, begun, number, "crowd")) for number in range(4)]
    await settle()
    others = [asyncio.create_task(arrive(arrivals, never, begun, number, f"{number}")) for number in (8, 9)]
    for number in (3, 2):
        with pytest.raises(ReceivingFull):
            await crowd[number]
    for task in (crowd[0], crowd[1], others[0]):
        task.cancel()
        await settle()
    assert begun == [0, 1, 8, 9]
    others[1].cancel()


@on_a_loop
async def test_callers_that_wait_come_in_turn() -> None:
    arrivals, begun, never = Arrivals(1, 8, grace=1000), list[int](), asyncio.Event()
    tasks = {}
    for number, caller in enumerate("aaabb"):
        tasks[number] = asyncio.create_task(arrive(arrivals, never, begun, number, caller))
        await settle()
    for number in (0, 1, 3, 2):
        tasks[number].cancel()
        await settle()
    assert begun == [0, 1, 3, 2, 4]
    tasks[4].cancel()


@on_a_loop
async def test_one_that_leaves_as_it_gets_its_turn_passes_it_on() -> None:
    arrivals, begun, come = Arrivals(1, 8, grace=1000), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(arrive(arrivals, come, begun, number)) for number in range(3)]
    await settle()
    arrivals._leave("one")  # and before the second task hears of it:
    tasks[1].cancel()
    await settle()
    assert begun == [0, 2]
    arrivals._held["one"] += 1  # which the first still gives back
    come.set()
    assert await tasks[2] == 2


def test_turns_are_as_many_as_largest_bodies_may_be_received() -> None:
    settings = load_settings({"max_receiving_bytes": 1000 << 20, "max_request_bytes": 10 << 20, "workers": 2})
    assert Arrivals.of(settings)._most == 50
    assert Arrivals.of(load_settings())._most == 8
