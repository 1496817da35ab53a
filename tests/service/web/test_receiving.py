"""Bodies that are being received: how many bytes they may have, and who gives way to whom."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from service.errors import QueueFull, ReceivingFull
from service.web.admission import MIN_BODY_RATE as RATE
from service.web.admission import Body, ByteBudget, Receiving
from tests.service.fakes import on_a_loop, png
from tests.service.web.apps import App, Clock, app, budget_of, form, service_in, until
from tests.service.web.http_communicator import HttpCommunicator


class Bodies:
    """Bodies under a clock; `ended` names those that had to give way, in order."""

    def __init__(self, *, capacity: int = 1_000_000, spacious: int = 2, turnover: float = 0) -> None:
        self.clock = Clock()
        self.budget = ByteBudget(capacity)
        self.receiving = Receiving(self.budget, spacious=spacious, turnover=turnover, clock=self.clock)
        self.ended: list[str] = []
        self.stack = ExitStack()

    def arrive(self, name: str) -> Body:
        body = self.stack.enter_context(self.receiving.body())
        self.stack.enter_context(self.receiving.arriving(body, lambda: self.ended.append(name)))
        return body


def test_a_body_may_be_a_second_behind_its_rate_before_it_crawls() -> None:
    bodies = Bodies(spacious=1)
    bodies.arrive("silent")
    bodies.clock.now += 1
    bodies.arrive("newcomer")
    assert bodies.ended == []
    bodies.clock.now += 0.01
    bodies.arrive("newcomer")
    assert bodies.ended == ["silent"]


def test_for_the_room_of_its_connection_a_body_crawls_when_all_of_it_came_too_slowly() -> None:
    bodies = Bodies()
    silent, steady = bodies.arrive("silent"), bodies.arrive("steady")
    for _ in range(3):
        bodies.receiving.add(steady, RATE)
    bodies.clock.now += 0.1
    assert not bodies.receiving.crawls(silent)
    bodies.clock.now += 0.01
    assert bodies.receiving.crawls(silent)
    bodies.clock.now += 2.9  # a pause after what came faster than it must
    assert not bodies.receiving.crawls(steady)
    bodies.clock.now += 0.1
    assert bodies.receiving.crawls(steady)
    bodies.stack.close()
    assert not bodies.receiving.crawls(silent)


def test_the_slowest_gives_way_first_and_only_while_room_is_wanted() -> None:
    bodies = Bodies(spacious=3)
    slow, slower, fast = (bodies.arrive(name) for name in ("slow", "slower", "fast"))
    for _ in range(4):
        bodies.clock.now += 1
        bodies.receiving.add(slow, RATE // 2)
        bodies.receiving.add(slower, RATE // 4)
        bodies.receiving.add(fast, RATE)
    assert bodies.ended == []
    for _ in range(3):
        bodies.arrive("newcomer")
    assert bodies.ended == ["slower", "slow"]
    assert (slow.gave_way, slower.gave_way, fast.gave_way) == (True, True, False)


def test_those_who_came_together_do_not_all_give_way_together() -> None:
    bodies = Bodies(spacious=1, turnover=40)
    for name in "abcd":
        bodies.arrive(name)
    bodies.clock.now += 2
    for _ in range(3):
        bodies.arrive("newcomer")
    assert bodies.ended == ["a"]
    bodies.clock.now += 10
    bodies.arrive("newcomer")
    assert bodies.ended == ["a", "b"]


def test_a_service_keeps_an_eighth_of_its_places_for_those_who_crawl_and_lets_them_go_in_half_its_patience() -> None:
    for places, spacious in ((24, 3), (4, 1)):
        receiving = service_in(app(queue_size=places, request_timeout=40)).receiving
        assert (receiving._spacious, receiving._turnover) == (spacious, 20)


def test_a_burst_buys_one_second_and_no_more() -> None:
    bodies = Bodies(spacious=1)
    bodies.receiving.add(bodies.arrive("burst"), 100 * RATE)
    bodies.clock.now += 1.01
    bodies.arrive("newcomer")
    assert bodies.ended == ["burst"]


def test_a_body_that_goes_on_crawls_no_more() -> None:
    bodies = Bodies(spacious=1)
    body = bodies.arrive("late")
    bodies.clock.now += 5
    bodies.receiving.add(body, 10 * RATE)
    bodies.arrive("newcomer")
    assert bodies.ended == []


def test_a_body_that_is_here_gives_way_to_none_and_its_bytes_count_until_it_is_answered() -> None:
    bodies = Bodies(capacity=100, spacious=1)
    with bodies.receiving.body() as body:
        with bodies.receiving.arriving(body, lambda: bodies.ended.append("whole")):
            bodies.receiving.add(body, 100)
        bodies.clock.now += 10
        with pytest.raises(ReceivingFull):
            bodies.receiving.add(bodies.arrive("newcomer"), 1)
        assert bodies.budget.in_use == 100
    assert bodies.ended == []
    assert bodies.budget.in_use == 0


def test_bytes_beyond_the_budget_are_refused_and_not_counted() -> None:
    bodies = Bodies(capacity=100)
    one, two = bodies.arrive("one"), bodies.arrive("two")
    bodies.receiving.add(one, 60)
    bodies.receiving.add(two, 40)
    with pytest.raises(ReceivingFull, match="100 bytes"):
        bodies.receiving.add(two, 1)
    assert bodies.budget.in_use == 100
    bodies.stack.close()
    assert bodies.budget.in_use == 0


def test_for_memory_the_largest_that_crawl_give_way_and_no_more_than_must() -> None:
    bodies = Bodies(capacity=100, spacious=10)
    small, large, larger = (bodies.arrive(name) for name in ("small", "large", "larger"))
    bodies.arrive("empty")
    for body, size in ((small, 10), (large, 30), (larger, 50)):
        bodies.receiving.add(body, size)
    bodies.clock.now += 2
    newcomer = bodies.arrive("newcomer")
    bodies.receiving.add(newcomer, 80)
    assert bodies.ended == ["larger", "large"]
    assert bodies.budget.in_use == 90
    bodies.stack.close()
    assert bodies.budget.in_use == 0


def test_a_body_does_not_give_way_to_itself() -> None:
    bodies = Bodies(capacity=100)
    body = bodies.arrive("only")
    bodies.receiving.add(body, 99)
    bodies.clock.now += 5
    with pytest.raises(ReceivingFull):
        bodies.receiving.add(body, 2)
    assert bodies.ended == []


def crawler(service: App, path: str = "/classify", **headers: str) -> HttpCommunicator:
    """A caller that sends one byte, and never another."""
    caller = service.communicator("POST", path, headers={"content-type": "image/png", **headers}, body=None)
    caller.feed(b"\x89")
    return caller


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/classify/batch", "/attention"])
@pytest.mark.parametrize("keys", ["", "s3cret"])
async def test_callers_that_crawl_keep_nobody_out_and_the_slowest_is_408_when_its_room_is_wanted(
    path: str, keys: str
) -> None:
    clock = Clock()
    service = app(clock, queue_size=8, api_keys=keys, request_timeout=12)
    headers = {"authorization": "Bearer s3cret"}
    crawlers = [crawler(service, path, **headers) for _ in range(12)]
    running = [caller.start() for caller in crawlers]
    await until(lambda: all(caller.received == 2 for caller in crawlers))

    async def ask() -> int:
        return (
            await service.request("POST", "/classify", headers={"content-type": "a/b", **headers}, body=png(7))
        ).status

    assert [await ask() for _ in range(3)] == [200] * 3  # nobody crawls yet, and nobody is ended
    assert not any(caller.answered for caller in crawlers)
    clock.now += 1.5
    for _ in range(3):
        assert await ask() == 200
        clock.now += 0.6  # more than half the timeout divided by twelve
    await until(lambda: sum(caller.answered for caller in crawlers) == 3)
    for caller in crawlers[:3]:
        assert (caller.status, caller.code) == (408, "request_timeout")
        assert "too slowly" in caller.json["detail"]
    assert service.metric("vit_rejected_total", reason="request_timeout") == 3
    for caller in crawlers:
        caller.disconnect()
    await asyncio.gather(*running)
    assert budget_of(service).in_use == 0


@on_a_loop
async def test_a_request_takes_its_place_when_its_body_is_here_and_503_if_others_were_faster() -> None:
    service = app(queue_size=1)
    service.engine.gate.clear()
    slow, fast = (
        service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=None) for _ in range(2)
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
async def test_a_batch_that_needs_more_places_than_are_free_is_refused_at_the_file_that_is_too_many() -> None:
    service = app(queue_size=2)
    whole = form(png(1), png(2), png(3))
    communicator = service.communicator("POST", "/classify/batch", headers=whole["headers"], body=None)
    communicator.feed(whole["body"][:-30])  # the third file has begun
    running = communicator.start()
    await until(lambda: communicator.answered)
    assert (communicator.status, communicator.code) == (503, "queue_full")
    communicator.disconnect()
    await running


@on_a_loop
async def test_more_bytes_than_all_bodies_may_have_are_503_with_a_time_to_try_again() -> None:
    service = app(max_receiving_bytes=500, queue_size=10)
    hog = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=None)
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
async def test_a_picture_counts_until_it_is_answered() -> None:
    service = app()
    service.engine.gate.clear()
    running = asyncio.create_task(service.classify(png(7)))
    await until(lambda: service.engine.waiting == 1)
    assert budget_of(service).in_use == len(png(7))
    service.engine.gate.set()
    await running
    assert budget_of(service).in_use == 0


def test_those_who_began_a_moment_ago_are_expected_soon() -> None:
    bodies = Bodies()
    assert bodies.receiving.newcomers(9) == 0
    bodies.arrive("early")
    bodies.clock.now += 0.05
    for name in "abc":
        bodies.arrive(name)
    assert [bodies.receiving.newcomers(most) for most in (0, 2, 4, 9)] == [0, 2, 4, 4]
    bodies.clock.now += 0.06
    assert bodies.receiving.newcomers(9) == 3
    bodies.stack.close()
    assert bodies.receiving.newcomers(9) == 0


def test_a_moment_is_a_tenth_of_a_second_and_ends_after_it() -> None:
    bodies = Bodies()
    bodies.clock.now = 0.0
    bodies.arrive("early")
    bodies.clock.now = 0.1
    assert bodies.receiving.newcomers(9) == 1
    bodies.clock.now = 0.1001
    assert bodies.receiving.newcomers(9) == 0


@on_a_loop
async def test_bodies_that_have_begun_keep_places_for_a_moment_but_never_all() -> None:
    clock = Clock()
    service = service_in(app(clock=clock, queue_size=4))
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(service.receiving.arriving(stack.enter_context(service.receiving.body()), lambda: None))
        service.check_room()  # two of four places are kept, two are free
        with service.limiter.permit():
            service.check_room()
            with service.limiter.permit():
                with pytest.raises(QueueFull):
                    service.check_room()
                clock.now += 0.2
                service.check_room()
