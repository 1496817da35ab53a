"""Work that waits or runs beside the event loop, is dropped in time, and does not hold up work of another kind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from service.errors import ClientDisconnected, DeadlineExceeded, QueueFull
from service.web import pipeline
from service.web.lanes import Control, Deadline, Lane, PictureTooBig
from service.web.routes import attention
from tests.model.images.pictures import encode, noise
from tests.service.fakes import PATIENCE, SIZE, on_a_loop, png
from tests.service.web.apps import App, Clock, app, kept, pipeline_of, settle, until


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("test", 1, capacity=2, max_cost=100)
    yield made
    made.close()


class Blocker:
    """Work that runs until it is let go, and asks its control then."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, control: Control | None = None) -> str:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        try:
            if control is not None:
                control.check()
        except Exception as error:
            self.error = error
            raise
        return "done"

    async def wait_until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, PATIENCE)


class Picture:
    """Something of which one can tell whether it is still held."""


def look_at(picture: Picture, seen: list[object], _: Control) -> None:
    seen.append(picture)


def costs(cost: float, control: Control) -> str:
    control.estimated(cost)
    return "done"


@on_a_loop
async def test_work_whose_caller_leaves_while_it_waits_is_let_go_of_at_once(lane: Lane) -> None:
    blocker, picture = Blocker(), Picture()
    ran: list[object] = []
    running = asyncio.create_task(lane.run(blocker, Deadline(1e9, Clock())))
    await blocker.wait_until_begun()
    held = weakref.ref(picture)
    waiting = asyncio.create_task(lane.run(partial(look_at, picture, ran), Deadline(1e9, Clock())))
    del picture
    await settle()
    assert lane.outstanding == 2
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    assert lane.outstanding == 1
    del waiting
    await settle()
    assert held() is None
    assert not running.done()
    blocker.go_on.set()
    assert await running == "done"
    assert ran == []


@on_a_loop
async def test_work_whose_time_is_up_while_it_waits_fails_at_once(lane: Lane) -> None:
    blocker, clock = Blocker(), Clock()
    ran: list[object] = []
    running = asyncio.create_task(lane.run(blocker, Deadline(1e9, clock)))
    await blocker.wait_until_begun()
    with pytest.raises(DeadlineExceeded):
        await lane.run(ran.append, Deadline(clock.now, clock))
    assert not running.done()
    blocker.go_on.set()
    await running
    assert ran == []


@on_a_loop
async def test_work_under_way_ends_at_its_next_step_when_its_time_is_up(lane: Lane) -> None:
    blocker, clock = Blocker(), Clock()
    running = asyncio.create_task(lane.run(blocker, Deadline(60, clock)))
    await blocker.wait_until_begun()
    clock.now = 60
    blocker.go_on.set()
    with pytest.raises(DeadlineExceeded):
        await running
    assert isinstance(blocker.error, DeadlineExceeded)


@on_a_loop
async def test_work_under_way_ends_at_its_next_step_when_its_caller_leaves_and_is_awaited(lane: Lane) -> None:
    blocker, complaints = Blocker(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    running = asyncio.create_task(lane.run(blocker, Deadline(1e9, Clock())))
    await blocker.wait_until_begun()
    running.cancel()
    await settle()
    assert not running.done()
    assert lane.outstanding == 1
    blocker.go_on.set()
    await asyncio.wait((running,))
    assert running.cancelled()
    assert isinstance(blocker.error, ClientDisconnected)
    assert lane.outstanding == 0
    del running
    gc.collect()
    assert complaints == [], "what became of it is seen, though nobody asks any more"


@on_a_loop
async def test_a_lane_has_a_bound(lane: Lane) -> None:
    blocker, deadline = Blocker(), Deadline(1e9, Clock())
    first, second = (asyncio.create_task(lane.run(blocker, deadline)) for _ in range(2))
    await settle()
    with pytest.raises(QueueFull, match="all 2 places of the test threads"):
        await lane.run(blocker, deadline)
    blocker.go_on.set()
    assert [await first, await second] == ["done", "done"]
    assert await lane.run(lambda _: 3, deadline) == 3


@on_a_loop
async def test_a_lane_that_is_closed_drops_what_waits_and_waits_for_nobody(lane: Lane) -> None:
    blocker = Blocker()
    running, waiting = lane.pool.submit(blocker), lane.pool.submit(blocker)
    await blocker.wait_until_begun()
    lane.close()
    assert (running.done(), waiting.cancelled()) == (False, True)
    with pytest.raises(RuntimeError):
        lane.pool.submit(blocker)
    blocker.go_on.set()
    assert running.result() == "done"


@on_a_loop
async def test_work_that_costs_more_than_its_lane_allows_is_sent_back(lane: Lane) -> None:
    with pytest.raises(PictureTooBig):
        await lane.run(partial(costs, 101), Deadline(1e9, Clock()))
    assert await lane.run(partial(costs, 100), Deadline(1e9, Clock())) == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
@on_a_loop
async def test_a_background_lane_gives_way_to_other_threads() -> None:
    def niceness(_: Control) -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    deadline, here = Deadline(1e9, Clock()), os.getpriority(os.PRIO_PROCESS, 0)
    for background, expected in ((False, here), (True, max(here, 10))):
        made = Lane("test", 1, background=background)
        assert await made.run(niceness, deadline) == expected
        made.close()
    lanes = pipeline_of(app()).lanes
    ran = [await each.run(niceness, deadline) for each in (lanes.small, lanes.big, lanes.drawing)]
    assert ran == [here, max(here, 10), max(here, 10)]


@on_a_loop
async def test_a_picture_is_big_beyond_ten_megapixels_of_png() -> None:
    lanes, deadline = pipeline_of(app()).lanes, Deadline(1e9, Clock())
    assert await lanes.small.run(partial(costs, 10_000_000), deadline) == "done"
    with pytest.raises(PictureTooBig):
        await lanes.small.run(partial(costs, 10_000_001), deadline)
    assert await lanes.big.run(partial(costs, 1e12), deadline) == "done"


def big_from(cost: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> App:
    """An application whose big pictures begin at a small size."""
    monkeypatch.setattr(pipeline, "BIG_PICTURE", cost)
    return app(**settings)


@on_a_loop
async def test_a_small_picture_is_answered_while_big_ones_hold_all_of_their_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = big_from(SIZE * SIZE, monkeypatch, decode_threads=2)
    blocker = Blocker()
    pool = pipeline_of(service).lanes.big.pool
    blocked = pool.submit(blocker)
    big = [
        service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=png(3, (SIZE, SIZE + 1)))
        for _ in range(4)
    ]
    running = [each.start() for each in big]
    await until(lambda: pool._work_queue.qsize() == 4)
    assert (await service.classify()).status == 200
    assert not any(each.answered for each in big)
    blocker.go_on.set()
    blocked.result()
    await asyncio.gather(*running)
    assert [each.status for each in big] == [200] * 4


@on_a_loop
async def test_big_pictures_have_half_of_the_threads_and_at_least_one() -> None:
    lanes = [pipeline_of(app(decode_threads=threads)).lanes for threads in (1, 2, 8)]
    assert [each.big.pool._max_workers for each in lanes] == [1, 1, 4]
    assert [each.small.pool._max_workers for each in lanes] == [1, 2, 8]


@on_a_loop
async def test_decoding_ends_between_two_pieces_when_the_caller_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    body = encode(noise(200, 200), "PNG")
    blocker, checks = Blocker(), []
    check = Control.check

    def slow_check(control: Control) -> None:
        checks.append(control)
        if len(checks) == 8:
            blocker()
        check(control)

    monkeypatch.setattr(Control, "check", slow_check)
    service = app(queue_size=1)
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=body)
    running = communicator.start()
    await blocker.wait_until_begun()
    communicator.disconnect()
    await until(communicator.inbox.empty)
    await settle()
    blocker.go_on.set()
    await running
    assert len(checks) == 8, "of about 30 pieces"
    assert pipeline_of(service).limiter.in_use == 0


@on_a_loop
async def test_maps_that_are_drawn_hold_up_no_classification_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    service = app(max_drawings=2)
    image_id = await kept(service)
    blocker = Blocker()
    monkeypatch.setattr(attention, "encode_png", lambda *_: blocker().encode())
    maps = [service.communicator("GET", "/attention", query=f"id={image_id}") for _ in range(2)]
    running = [each.start() for each in maps]
    await until(lambda: pipeline_of(service).lanes.drawing.outstanding == 2)
    assert (await service.classify()).status == 200
    refused = await service.get("/attention", f"id={image_id}")
    assert (refused.status, refused.code) == (503, "queue_full")
    assert (await service.get("/attention", f"id={image_id}&format=json")).status == 200
    blocker.go_on.set()
    await asyncio.gather(*running)
    assert [each.content for each in maps] == [b"done"] * 2


@on_a_loop
async def test_a_map_whose_time_is_up_before_it_is_drawn_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    service = app(clock, request_timeout=10)
    image_id = await kept(service)
    blocker, drawn = Blocker(), []
    blocked = pipeline_of(service).lanes.drawing.pool.submit(blocker)
    monkeypatch.setattr(attention, "draw_heatmap", lambda *_, **__: drawn.append(1))
    communicator = service.communicator("GET", "/attention", query=f"id={image_id}")
    running = communicator.start()
    await until(lambda: pipeline_of(service).lanes.drawing.outstanding == 1)
    clock.now += 10
    blocker.go_on.set()
    await running
    blocked.result()
    assert (communicator.status, communicator.code) == (504, "deadline_exceeded")
    assert drawn == []


@on_a_loop
async def test_a_map_whose_caller_leaves_is_not_drawn_and_frees_its_place_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = app(queue_size=1)
    image_id = await kept(service)
    blocker, drawn = Blocker(), []
    blocked = pipeline_of(service).lanes.drawing.pool.submit(blocker)
    monkeypatch.setattr(attention, "draw_heatmap", lambda *_, **__: drawn.append(1))
    communicator = service.communicator("GET", "/attention", query=f"id={image_id}")
    running = communicator.start()
    await until(lambda: pipeline_of(service).lanes.drawing.outstanding == 1)
    communicator.disconnect()
    await running
    assert pipeline_of(service).limiter.in_use == 0
    assert not blocked.done()
    blocker.go_on.set()
    blocked.result()
    assert drawn == []
