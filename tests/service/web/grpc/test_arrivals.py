"""Messages arrive a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from service.errors import RequestTimeout
from service.settings import load_settings
from service.web.grpc.arrivals import Arrivals
from tests.service.fakes import on_a_loop
from tests.service.web.apps import settle


async def arrive(arrivals: Arrivals, come: asyncio.Event, begun: list[int], number: int) -> int:
    async with arrivals.turn():
        begun.append(number)
        await come.wait()
    return number


@on_a_loop
async def test_so_many_arrive_at_the_same_time_and_the_others_in_their_order() -> None:
    arrivals, begun = Arrivals(2, grace=1000), list[int]()
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
    arrivals, begun, come = Arrivals(1, grace=0), list[int](), asyncio.Event()
    slow = asyncio.create_task(arrive(arrivals, asyncio.Event(), begun, 0))
    await settle()
    assert not slow.done()
    come.set()
    assert await arrive(arrivals, come, begun, 1) == 1
    with pytest.raises(RequestTimeout, match="too slowly"):
        await slow


@on_a_loop
async def test_one_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    arrivals, begun, come = Arrivals(1, grace=1000), list[int](), asyncio.Event()
    tasks = [asyncio.create_task(arrive(arrivals, come, begun, number)) for number in range(3)]
    await settle()
    tasks[0].cancel()
    tasks[1].cancel()
    come.set()
    assert await tasks[2] == 2


@on_a_loop
async def test_an_error_of_the_message_itself_is_no_giving_way() -> None:
    with pytest.raises(TimeoutError, match="its own"):
        async with Arrivals(1).turn():
            raise TimeoutError("its own")


class Timer:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@on_a_loop
async def test_a_slow_one_is_looked_at_after_the_grace_and_then_four_times_as_often_until_it_ends(
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
        async with Arrivals(1, grace=8).turn():
            looks[0][1]()
            looks[1][1]()
    assert [delay for delay, _ in looks] == [8, 2, 2]
    assert timers[-1].cancelled


def test_turns_are_as_many_as_largest_bodies_may_be_received() -> None:
    settings = load_settings({"max_receiving_bytes": 1000 << 20, "max_request_bytes": 10 << 20, "workers": 2})
    assert Arrivals.of(settings)._places._value == 50
    assert Arrivals.of(load_settings())._places._value == 8
