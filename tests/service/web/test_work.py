"""Work that waits or runs beside the event loop, is dropped in time, and does not hold up work of another kind."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from service.errors import DeadlineExceeded, EngineUnavailable, QueueFull
from service.web import pipeline, work
from service.web.routes import attention
from service.web.work import Deadline, ThreadPool
from tests.service.fakes import PATIENCE, on_a_loop
from tests.service.web.apps import Clock, app, kept, pipeline_of, settle, until


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool("test", 1, capacity=2)
    yield made
    made.close()


class Blocker:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.go_on.wait(PATIENCE)
        return "done"

    async def wait_until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, PATIENCE)


class Picture:
    """Something of which one can tell whether it is still held."""


def look_at(picture: Picture, seen: list[object]) -> None:
    seen.append(picture)


@on_a_loop
async def test_work_whose_caller_leaves_while_it_waits_is_let_go_of_at_once(pool: ThreadPool) -> None:
    blocker, picture = Blocker(), Picture()
    ran: list[object] = []
    running = asyncio.create_task(pool.run(blocker, Deadline(1e9, Clock())))
    await blocker.wait_until_begun()
    held = weakref.ref(picture)
    waiting = asyncio.create_task(pool.run(partial(look_at, picture, ran), Deadline(1e9, Clock())))
    del picture
    await settle()
    assert pool.outstanding == 2
    waiting.cancel()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    assert pool.outstanding == 1
    del waiting
    await settle()
    assert held() is None
    assert not running.done()
    blocker.go_on.set()
    assert await running == "done"
    assert ran == []


@on_a_loop
async def test_work_whose_time_is_up_while_it_waits_fails_at_once(pool: ThreadPool) -> None:
    blocker, clock = Blocker(), Clock()
    ran: list[object] = []
    running = asyncio.create_task(pool.run(blocker, Deadline(1e9, clock)))
    await blocker.wait_until_begun()
    with pytest.raises(DeadlineExceeded):
        await pool.run(partial(ran.append, 1), Deadline(clock.now, clock))
    assert not running.done()
    blocker.go_on.set()
    await running
    assert ran == []


@on_a_loop
async def test_work_whose_time_was_up_when_a_thread_came_to_it_is_not_done(pool: ThreadPool) -> None:
    blocker, clock = Blocker(), Clock()
    ran: list[object] = []
    running = asyncio.create_task(pool.run(blocker, Deadline(1e9, clock)))
    await blocker.wait_until_begun()
    waiting = asyncio.create_task(pool.run(partial(ran.append, 1), Deadline(60, clock)))
    await settle()
    clock.now = 60
    blocker.go_on.set()
    with pytest.raises(DeadlineExceeded):
        await waiting
    await running
    assert ran == []


@on_a_loop
async def test_work_under_way_is_awaited_though_its_caller_leaves_or_its_time_is_up(pool: ThreadPool) -> None:
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    for cancelled in (True, False):
        blocker = Blocker()
        running = asyncio.create_task(pool.run(blocker, Deadline(1e9 if cancelled else 50.05, Clock())))
        await blocker.wait_until_begun()
        if cancelled:
            running.cancel()
        else:
            await asyncio.sleep(0.1)
        await settle()
        assert not running.done()
        assert pool.outstanding == 1
        blocker.go_on.set()
        await asyncio.wait((running,))
        assert running.cancelled() or isinstance(running.exception(), DeadlineExceeded)
        assert pool.outstanding == 0
    gc.collect()
    assert complaints == [], "what became of it is seen, though nobody asks any more"


@on_a_loop
async def test_work_in_the_background_is_left_to_itself_when_its_time_is_up() -> None:
    made, blocker = ThreadPool("test", 1, capacity=1, background=True), Blocker()
    with pytest.raises(DeadlineExceeded):
        await made.run(blocker, Deadline(50.05, Clock()))
    assert made.outstanding == 1
    with pytest.raises(QueueFull):
        await made.run(blocker, Deadline(1e9, Clock()))
    blocker.go_on.set()
    await until(lambda: made.outstanding == 0)
    made.close()


@on_a_loop
async def test_a_pool_that_has_been_at_one_job_for_too_long_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, waited = Clock(), Clock()
    waited.now = 0.0
    monkeypatch.setattr(work, "seconds_without_core", lambda _: waited.now)
    monkeypatch.setattr("service.web.work.time.monotonic", clock)
    service, blocker = app(), Blocker()
    pool = pipeline_of(service).pools.pictures
    running = asyncio.create_task(pool.run(blocker, Deadline(1e9, clock)))
    await blocker.wait_until_begun()
    pool.check()  # from the first look on it is not to blame for waits
    waited.now = 8.0
    clock.now += 22.9
    assert (await service.get("/readyz")).status == 200
    clock.now += 0.1
    for path in ("/readyz", "/v2/health/ready"):
        assert (await service.get(path)).status == 503
    with pytest.raises(EngineUnavailable, match="decode threads"):
        pool.check()
    blocker.go_on.set()
    await running
    assert (await service.get("/readyz")).status == 200


@on_a_loop
async def test_a_pool_has_a_bound(pool: ThreadPool) -> None:
    blocker, deadline = Blocker(), Deadline(1e9, Clock())
    first, second = (asyncio.create_task(pool.run(blocker, deadline)) for _ in range(2))
    await settle()
    with pytest.raises(QueueFull, match="all 2 places of the test threads"):
        await pool.run(blocker, deadline)
    blocker.go_on.set()
    assert [await first, await second] == ["done", "done"]
    assert await pool.run(lambda: 3, deadline) == 3


@on_a_loop
async def test_jobs_that_end_while_the_loop_is_busy_wake_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ended, wakes = ThreadPool("test", 1), threading.Event(), list[int]()
    wake = made._wake_callers

    def counted() -> None:
        wakes.append(1)
        wake()

    monkeypatch.setattr(made, "_wake_callers", counted)
    deadline, work = Deadline(1e9, Clock()), list[Callable[[], int | None]]([*[int] * 5, ended.set])
    jobs = [asyncio.create_task(made.run(each, deadline)) for each in work]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ended.wait(PATIENCE)  # the loop stands still meanwhile
    assert await asyncio.gather(*jobs) == [*[0] * 5, None]
    assert len(wakes) <= 2, "the last job may end after the loop has looked"
    made.close()


@on_a_loop
async def test_work_that_waits_in_a_pool_that_is_closed_is_cancelled() -> None:
    made, blocker = ThreadPool("test", 1), Blocker()
    running = asyncio.create_task(made.run(blocker, Deadline(1e9, Clock())))
    await blocker.wait_until_begun()
    waiting = asyncio.create_task(made.run(int, Deadline(1e9, Clock())))
    await settle()
    made.close()
    await asyncio.wait((waiting,))
    assert waiting.cancelled()
    blocker.go_on.set()
    assert await running == "done"


@on_a_loop
async def test_a_pool_that_is_closed_drops_what_waits_and_waits_for_nobody(pool: ThreadPool) -> None:
    blocker = Blocker()
    running, waiting = pool.executor.submit(blocker), pool.executor.submit(blocker)
    await blocker.wait_until_begun()
    pool.close()
    assert (running.done(), waiting.cancelled()) == (False, True)
    with pytest.raises(RuntimeError):
        pool.executor.submit(blocker)
    blocker.go_on.set()
    assert running.result() == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority for each thread")
@on_a_loop
async def test_a_background_lane_gives_way_to_other_threads() -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    deadline, here = Deadline(1e9, Clock()), os.getpriority(os.PRIO_PROCESS, 0)
    for background, expected in ((False, here), (True, max(here, 10))):
        made = ThreadPool("test", 1, background=background)
        assert await made.run(niceness, deadline) == expected
        made.close()
    mine = pipeline_of(app()).pools
    ran = [await each.run(niceness, deadline) for each in (mine.pictures, mine.documents, mine.drawing)]
    assert ran == [here, max(here, 10), max(here, 10)]


@on_a_loop
async def test_maps_that_are_drawn_hold_up_no_classification_and_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MAX_DRAWINGS", 2)
    service = app()
    image_id = await kept(service)
    blocker = Blocker()
    monkeypatch.setattr(attention, "encode_png", lambda *_: blocker().encode())
    maps = [service.communicator("GET", "/attention", query=f"id={image_id}") for _ in range(2)]
    running = [each.start() for each in maps]
    await until(lambda: pipeline_of(service).pools.drawing.outstanding == 2)
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
    blocked = pipeline_of(service).pools.drawing.executor.submit(blocker)
    monkeypatch.setattr(attention, "draw_maps", lambda *_, **__: drawn.append(1))
    communicator = service.communicator("GET", "/attention", query=f"id={image_id}")
    running = communicator.start()
    await until(lambda: pipeline_of(service).pools.drawing.outstanding == 1)
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
    blocked = pipeline_of(service).pools.drawing.executor.submit(blocker)
    monkeypatch.setattr(attention, "draw_maps", lambda *_, **__: drawn.append(1))
    communicator = service.communicator("GET", "/attention", query=f"id={image_id}")
    running = communicator.start()
    await until(lambda: pipeline_of(service).pools.drawing.outstanding == 1)
    communicator.disconnect()
    await running
    assert pipeline_of(service).limiter.in_use == 0
    assert not blocked.done()
    blocker.go_on.set()
    blocked.result()
    assert drawn == []


def test_a_thread_that_still_ends_work_of_one_event_loop_wakes_the_next_one(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gate:
        """The pool's lock, at which its thread waits after its first job."""

        def __init__(self, lock: threading.Lock) -> None:
            self.lock, self.entered, self.open = lock, 0, threading.Event()

        def __enter__(self) -> None:
            if threading.current_thread().name.startswith("test"):
                self.entered += 1
                assert self.entered != 2 or self.open.wait(PATIENCE)
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    gate = Gate(pool._lock)
    monkeypatch.setattr(pool, "_lock", gate)
    deadline = Deadline(PATIENCE, lambda: 0.0)
    assert asyncio.run(pool.run(lambda: 1, deadline)) == 1

    async def of_the_next_loop() -> int:
        waiting = asyncio.ensure_future(pool.run(lambda: 2, deadline))
        await asyncio.sleep(0)
        gate.open.set()
        async with asyncio.timeout(PATIENCE):
            return await waiting

    assert asyncio.run(of_the_next_loop()) == 2
