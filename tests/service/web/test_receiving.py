"""Bytes and slots of requests while bodies arrive, and the pace of refusals."""

import asyncio
import gc
import weakref
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

from service.errors import QueueFull, ReceivingFull
from service.web.admit import check_room
from service.web.limiter import MIN_BODY_RATE as RATE
from service.web.limiter import ByteBudget, CountedBytes
from service.web.refusal_pace import RefusalPace
from tests.service.fakes import on_a_loop, png, until
from tests.service.web.apps import Clock, app, budget_of, form, service_in


class Bodies:
    """Bodies under a clock; `ended` lists the names of ended bodies in order."""

    def __init__(self, *, capacity: int = 1_000_000) -> None:
        self.clock = Clock()
        self.byte_budget = ByteBudget(capacity, self.clock)
        self.ended: list[str] = []
        self.stack = ExitStack()

    def arrive(self, name: str, size: int = 0) -> CountedBytes:
        body = CountedBytes()
        self.stack.callback(self.byte_budget.give_back, body)
        self.stack.enter_context(self.byte_budget.arriving(body, lambda: self.ended.append(name)))
        self.byte_budget.add(body, size)
        return body


class Reader:
    """A connection with bytes that its caller has not read yet."""

    def __init__(self, unsent_bytes: int, caller: str = "") -> None:
        self.caller = caller
        self.unsent_bytes = unsent_bytes
        self.is_cut = False

    def give_way(self) -> None:
        self.is_cut = True


def test_the_slowest_reader_makes_room() -> None:
    bodies = Bodies(capacity=100)
    slow = Reader(40)
    steady = Reader(50)
    for reader in (steady, slow):
        bodies.byte_budget.add_reader(reader)
    bodies.clock.now += 10
    slow.unsent_bytes -= 5
    steady.unsent_bytes -= 10
    newcomer = Reader(30)
    bodies.byte_budget.add_reader(newcomer)
    assert (slow.is_cut, steady.is_cut, newcomer.is_cut) == (True, False, False)
    too_large = Reader(101)
    bodies.byte_budget.add_reader(too_large)
    assert (steady.is_cut, newcomer.is_cut, too_large.is_cut) == (True, False, True)


def test_the_caller_with_most_unread_gives_way() -> None:
    bodies = Bodies(capacity=100)
    few = Reader(20, "few")
    many = [Reader(38, "many") for _ in range(2)]
    for reader in (few, *many):
        bodies.byte_budget.add_reader(reader)
    many[0].unsent_bytes -= 1
    bodies.byte_budget.add_reader(Reader(10, "new"))  # at once
    assert (few.is_cut, many[0].is_cut, many[1].is_cut) == (False, False, True)
    with pytest.raises(ReceivingFull, match="37 bytes"):
        bodies.byte_budget.check_unread("many")
    bodies.byte_budget.check_unread("few")


def test_unread_answers_give_way_to_bodies() -> None:
    bodies = Bodies(capacity=100)
    reader = Reader(80)
    bodies.byte_budget.add_reader(reader)
    with pytest.raises(ReceivingFull):  # in less than a second a reader is not known to be slow
        bodies.arrive("early", 30)
    bodies.clock.now += 2
    bodies.arrive("in time", 90)
    assert reader.is_cut
    other = Reader(5)
    bodies.byte_budget.add_reader(other)
    bodies.byte_budget.remove_reader(other)
    bodies.arrive("last", 10)
    assert not other.is_cut


def test_an_arrived_body_is_freed_at_once() -> None:
    class Request:
        def __init__(self, budget: ByteBudget) -> None:
            self.body = CountedBytes()
            with budget.arriving(self.body, self.end):
                budget.add(self.body, 1)

        def end(self) -> None:
            """End this body."""

    gc.disable()
    try:
        held = weakref.ref(Request(ByteBudget(10)))
        assert held() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("sent", "seconds", "is_slow"),
    [(1, 1.0, False), (1, 1.01, True), (3 * RATE, 1.01, True)],
    ids=["a second behind its rate", "more", "behind a burst"],
)
def test_a_body_is_slow_one_second_late(sent: int, seconds: float, is_slow: bool) -> None:
    bodies = Bodies(capacity=4 * RATE)
    bodies.arrive("slow", sent)
    bodies.clock.now += seconds
    bodies.arrive("steady", 4 * RATE - sent)
    with nullcontext() if is_slow else pytest.raises(ReceivingFull):
        bodies.arrive("newcomer", 1)
    assert bodies.ended == ["slow"] * is_slow


def test_the_largest_slow_bodies_give_way() -> None:
    bodies = Bodies(capacity=100)
    for name, size in (("small", 10), ("large", 30), ("larger", 50), ("empty", 0)):
        bodies.arrive(name, size)
    bodies.clock.now += 2
    bodies.arrive("newcomer", 80)
    assert bodies.ended == ["larger", "large"]
    assert bodies.byte_budget.in_use == 90
    bodies.stack.close()
    assert bodies.byte_budget.in_use == 0


def test_a_complete_body_never_gives_way() -> None:
    bodies = Bodies(capacity=100)
    body = CountedBytes()
    with bodies.byte_budget.arriving(body, lambda: bodies.ended.append("whole")):
        bodies.byte_budget.add(body, 100)
    bodies.clock.now += 10
    with pytest.raises(ReceivingFull, match="100 bytes"):
        bodies.arrive("newcomer", 1)
    assert bodies.byte_budget.in_use == 100
    bodies.byte_budget.give_back(body)
    assert (bodies.ended, bodies.byte_budget.in_use) == ([], 0)


@on_a_loop
async def test_slow_bodies_do_not_hold_slots() -> None:
    service = app(queue_size=8)
    headers = {"content-type": "image/png"}
    slow_callers = [
        service.communicator("POST", "/classify", headers=headers, body=None) for _ in range(12)
    ]
    for slow_caller in slow_callers:
        slow_caller.feed(b"\x89")
    running = [slow_caller.start() for slow_caller in slow_callers]
    await until(lambda: all(slow_caller.received == 2 for slow_caller in slow_callers))
    assert [(await service.classify(png(7))).status for _ in range(3)] == [200] * 3
    for slow_caller in slow_callers:
        slow_caller.disconnect()
    await asyncio.gather(*running)
    assert budget_of(service).in_use == 0


@on_a_loop
async def test_the_first_whole_body_gets_the_slot() -> None:
    service = app(queue_size=1)
    service.engine.gate.clear()
    slow, fast = (
        service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=None)
        for _ in range(2)
    )
    running = [caller.start() for caller in (slow, fast)]
    await until(lambda: slow.received == fast.received == 1)
    fast.feed(png(1), more=False)
    await until(lambda: service.engine.waiting == 1)
    assert service_in(service).limiter.in_use == 1
    slow.feed(png(2), more=False)
    await running[0]
    assert (slow.status, slow.code) == (503, "queue_full")
    service.engine.gate.set()
    await running[1]
    assert fast.status == 200
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_a_surplus_file_refuses_a_batch() -> None:
    service = app(queue_size=2)
    whole = form(png(1), png(2), png(3))
    communicator = service.communicator(
        "POST", "/classify/batch", headers=whole["headers"], body=None
    )
    communicator.feed(whole["body"][:-30])  # the third file has begun
    running = communicator.start()
    await until(lambda: communicator.answered)
    assert (communicator.status, communicator.code) == (503, "queue_full")
    communicator.disconnect()
    await running


@on_a_loop
async def test_bodies_beyond_the_memory_are_503() -> None:
    service = app(queue_size=10)
    budget_of(service).capacity = 500
    hog = service.communicator(
        "POST", "/classify", headers={"content-type": "image/png"}, body=None
    )
    hog.feed(bytes(490))
    running = hog.start()
    await until(lambda: hog.received == 2)
    refused = await service.classify(png(7))
    assert (refused.status, refused.code) == (503, "receiving_full")
    assert int(refused.headers["retry-after"]) >= 1
    assert service.metric("vit_rejected_total", reason="receiving_full") == 1
    assert budget_of(service).in_use == 490
    hog.disconnect()
    await running
    assert (await service.classify(png(7))).status == 200
    assert budget_of(service).in_use == 0


@on_a_loop
async def test_new_bodies_reserve_half_the_slots() -> None:
    clock = Clock()
    service = service_in(app(clock=clock, queue_size=4))
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(service.byte_budget.arriving(CountedBytes(), lambda: None))
        check_room(service)  # two of four slots are reserved, two are free
        with service.limiter.permit():
            check_room(service)
            with service.limiter.permit():
                with pytest.raises(QueueFull):
                    check_room(service)
                clock.now += 0.2
                check_room(service)


class Connection:
    """The part of a connection that a pace reads."""

    refused_at = float("-inf")


def test_fast_repeats_are_refused_late() -> None:
    clock = Clock()
    pace = RefusalPace(clock)
    connection: Any = Connection()
    delays = []
    for seconds in (0.0, 0.9, 2.9, 3.0):
        clock.now += seconds
        delays.append(pace.delay(connection))
    assert delays == [0, 2, 2, 0]
    clock.now += 10
    assert [pace.delay(None) for _ in range(501)] == [0] * 500 + [1]
    clock.now += 0.5
    assert [pace.delay(None) for _ in range(249)] == [0] * 249


def test_many_mistakes_are_answered_late() -> None:
    clock = Clock()
    pace = RefusalPace(clock)
    assert [pace.delay_of("hostile") for _ in range(51)] == [0] * 50 + [1]
    assert pace.delay_of("honest") == 0
    clock.now += 1
    assert pace.delay_of("hostile") == 0
