"""Deadlines, callers that go away, and permits that are released only when nothing is held any more."""

from __future__ import annotations

import asyncio
import gc
import io
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.requests import Request
from starlette.types import Message

from model.images.preprocess import ModelInput
from model.images.region import Region
from model.outputs import RequestedOutputs
from service.errors import EngineUnavailable, MalformedRequest
from service.web import pipeline
from service.web.decoders import Decoded
from service.web.work import Deadline, unless_disconnected
from tests.service.fakes import PATIENCE, SIZE, model_info, on_a_loop, pixels, png
from tests.service.web.apps import App, Clock, app, budget_of, form, pipeline_of, settle, until

BLACK = ModelInput(np.zeros((SIZE, SIZE, 3), np.uint8), Region(0, 0, SIZE, SIZE))


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/classify/batch", "/attention"])
async def test_the_time_left_for_the_engine_counts_from_the_requests_head(path: str) -> None:
    clock = Clock()
    service = app(clock, request_timeout=10)
    communicator = service.communicator("POST", path, headers={"content-type": "image/png"}, body=None)
    running = communicator.start()
    await until(lambda: communicator.received == 1)
    clock.now += 4  # a slow body
    communicator.feed(png(1), more=False)
    await running
    assert service.engine.timeouts == [6]


@pytest.mark.parametrize("state", ["loading", "failed", "closed"])
def test_nobody_is_admitted_while_no_engine_is_ready(state: str) -> None:
    service = app()
    service.engine.state = state
    admitting = pipeline_of(service)
    with pytest.raises(EngineUnavailable), admitting.admit_upload(Request({"type": "http"})):
        pytest.fail("an upload is admitted")
    with pytest.raises(EngineUnavailable), admitting.admit():
        pytest.fail("a request is admitted")
    assert admitting.limiter.in_use == 0
    service.engine.state = "ready"
    with admitting.admit():
        assert admitting.limiter.in_use == 1
    assert admitting.limiter.in_use == 0


@on_a_loop
async def test_a_body_that_does_not_arrive_in_time_is_408_and_leaves_nothing_behind() -> None:
    service = app(request_timeout=0.05, queue_size=1)
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=None)
    communicator.feed(png(1)[:10])
    running = communicator.start()
    await until(lambda: communicator.answered)
    assert (communicator.status, communicator.code) == (408, "request_timeout")
    assert pipeline_of(service).limiter.in_use == 0
    assert budget_of(service).in_use == 0
    communicator.disconnect()
    await running


@on_a_loop
async def test_time_that_is_up_before_decoding_begins_costs_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    service = app(clock, request_timeout=10)
    busy = threading.Event()
    pool = pipeline_of(service).pools.pictures.executor
    blocker = pool.submit(busy.wait, PATIENCE)
    decoded = []
    monkeypatch.setattr(pipeline, "model_input", lambda *a, **k: decoded.append(a))
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = communicator.start()
    await until(lambda: pool._work_queue.qsize() == 1)
    clock.now += 10
    busy.set()
    await running
    blocker.result()
    assert (communicator.status, communicator.code) == (504, "deadline_exceeded")
    assert decoded == []


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/attention"])
async def test_nobody_waits_for_an_engine_that_never_answers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_LATE_SECONDS", 0.0)
    service = app(request_timeout=0.4)
    service.engine.gate.clear()
    answer = await service.classify(path=path)
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert service.engine.cancelled == 1
    assert pipeline_of(service).limiter.in_use == 0


@on_a_loop
async def test_an_engine_has_half_a_second_more_than_the_requests_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds: list[float] = []
    service, clock = app(), Clock()
    inner = pipeline_of(service)
    monkeypatch.setattr(inner.pools.timers, "set", lambda _, seconds, ring: bounds.append(seconds))
    await inner.infer(pixels(1), Deadline(clock.now + 7, clock), RequestedOutputs(1))
    assert (bounds, service.engine.timeouts) == ([7.5], [7])


@on_a_loop
async def test_a_picture_that_was_launched_in_time_may_be_answered_late() -> None:
    service = app()
    inner, gate = pipeline_of(service), service.engine.gate
    gate.clear()
    time_is_up = Deadline(inner.clock(), inner.clock)
    waiting = asyncio.ensure_future(inner.infer(pixels(1), time_is_up, RequestedOutputs(1)))
    await settle()
    gate.set()
    assert (await waiting).batch_size == 1


@on_a_loop
async def test_a_caller_that_goes_away_while_sending_leaves_nothing_behind() -> None:
    service = app(queue_size=1, max_receiving_bytes=500)
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=None)
    communicator.feed(png(1)[:10])
    running = communicator.start()
    await until(lambda: communicator.received == 2)
    assert budget_of(service).in_use == 10
    communicator.disconnect()
    await running
    assert not communicator.answered
    assert pipeline_of(service).limiter.in_use == 0
    assert budget_of(service).in_use == 0
    assert service.metric("vit_cancelled_total") == 1
    assert service.metric("vit_inflight_requests") == 0
    assert (await service.classify()).status == 200


@on_a_loop
async def test_a_caller_that_goes_away_while_waiting_takes_its_image_out_of_the_queue() -> None:
    service = app(queue_size=1)
    service.engine.gate.clear()
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = communicator.start()
    await until(lambda: service.engine.waiting == 1)
    assert service.metric("vit_inflight_requests") == 1
    communicator.disconnect()
    await running
    assert not communicator.answered
    assert service.engine.cancelled == 1
    assert pipeline_of(service).limiter.in_use == 0
    assert service.metric("vit_cancelled_total") == 1
    assert service.metric("vit_inflight_requests") == 0


@on_a_loop
async def test_a_caller_of_a_batch_that_goes_away_takes_all_its_images_out() -> None:
    service = app(queue_size=5)
    service.engine.gate.clear()
    communicator = service.communicator("POST", "/classify/batch", **form(*(png(red) for red in range(5))))
    running = communicator.start()
    await until(lambda: service.engine.waiting == 5)
    communicator.disconnect()
    await running
    assert service.engine.cancelled == 5
    assert pipeline_of(service).limiter.in_use == 0


@on_a_loop
async def test_a_place_is_free_only_when_its_decode_thread_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    decoding, go_on = threading.Event(), threading.Event()

    def slow(*_: Any, **__: Any) -> ModelInput:
        decoding.set()
        assert go_on.wait(PATIENCE)
        return BLACK

    monkeypatch.setattr(pipeline, "model_input", slow)
    service = app(queue_size=2)
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = communicator.start()
    assert await asyncio.to_thread(decoding.wait, PATIENCE)
    communicator.disconnect()
    await until(communicator.inbox.empty)
    await settle()
    assert not running.done()
    assert pipeline_of(service).limiter.in_use == 1
    go_on.set()
    await running
    assert pipeline_of(service).limiter.in_use == 0
    assert service.engine.timeouts == []


def decoded_by(service: App) -> float:
    return service.metric("vit_stage_duration_seconds_count", stage="decode")


@on_a_loop
async def test_decoding_runs_four_batches_ahead_of_the_model_and_no_further() -> None:
    service = app()
    service.engine.info = model_info(max_batch=1)
    service.engine.gate.clear()
    callers = [asyncio.create_task(service.classify(png(red))) for red in range(6)]
    await until(lambda: service.engine.waiting == 4)
    explained = asyncio.create_task(service.classify(query="attention=relevance"))
    await until(lambda: service.engine.waiting == 5)
    await settle()
    assert decoded_by(service) == 5, "a map waits for no turn"
    callers[0].cancel()
    await until(lambda: decoded_by(service) == 6)
    service.engine.gate.set()
    answers = await asyncio.gather(*callers[1:], explained)
    assert [each.status for each in answers] == [200] * 6
    assert decoded_by(service) == 7


@on_a_loop
async def test_pictures_that_processes_decode_keep_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    service, go_on = app(), asyncio.Event()
    service.engine.info = model_info(max_batch=1)
    webp = io.BytesIO()
    Image.new("RGB", (8, 8)).save(webp, "WEBP")

    async def in_process(*_: Any) -> Decoded:
        await go_on.wait()
        return Decoded(BLACK, 1.0)

    monkeypatch.setattr(pipeline_of(service).pools.decoders, "model_input", in_process)
    costly = [asyncio.create_task(service.classify(webp.getvalue())) for _ in range(6)]
    await settle()
    assert (await service.classify(png(1))).status == 200
    assert not any(each.done() for each in costly)
    go_on.set()
    assert [(await each).status for each in costly] == [200] * 6


@on_a_loop
async def test_time_that_is_up_before_a_pictures_turn_costs_no_decoding() -> None:
    service = app(request_timeout=0.1)
    service.engine.info = model_info(max_batch=1)
    service.engine.gate.clear()
    callers = [asyncio.create_task(service.classify(png(red))) for red in range(4)]
    await until(lambda: service.engine.waiting == 4)
    late = await service.classify()
    assert (late.status, late.code) == (504, "deadline_exceeded")
    assert "turn" in late.json["detail"]
    assert decoded_by(service) == 4
    service.engine.gate.set()
    await asyncio.gather(*callers)
    assert (await service.classify()).status == 200


@on_a_loop
async def test_a_picture_whose_caller_is_gone_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    service = app()
    busy = threading.Event()
    pool = pipeline_of(service).pools.pictures.executor
    pool.submit(busy.wait, PATIENCE)
    decoded: list[Any] = []
    monkeypatch.setattr(pipeline, "model_input", lambda *a, **k: decoded.append(a))
    communicator = service.communicator("POST", "/classify", headers={"content-type": "image/png"}, body=png(1))
    running = communicator.start()
    await until(lambda: pool._work_queue.qsize() == 1)
    communicator.disconnect()
    await until(communicator.inbox.empty)
    await settle()
    busy.set()
    await running
    assert decoded == []


@on_a_loop
async def test_a_batch_that_meets_a_defect_keeps_its_places_until_every_decode_thread_has_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoding, go_on = threading.Event(), threading.Event()

    def decode(data: bytearray, *_: Any, **__: Any) -> ModelInput:
        if data == png(2):
            decoding.set()
            assert go_on.wait(PATIENCE)
        else:
            assert decoding.wait(PATIENCE)
        return BLACK

    monkeypatch.setattr(pipeline, "model_input", decode)
    service = app(queue_size=2)
    service.engine.error = KeyError("a defect")
    communicator = service.communicator("POST", "/classify/batch", **form(png(1), png(2)))
    running = communicator.start()
    await until(lambda: service.engine.timeouts != [])
    await settle()
    answered, in_use = communicator.answered, pipeline_of(service).limiter.in_use
    go_on.set()
    await running
    assert (answered, in_use) == (False, 2)
    assert (communicator.status, communicator.code) == (500, "internal_error")
    assert pipeline_of(service).limiter.in_use == 0
    assert len(service.engine.timeouts) == 1


# What runs beside a request


@on_a_loop
async def test_a_cancelled_request_stays_cancelled_and_what_its_thread_raises_is_seen() -> None:
    go_on = threading.Event()
    unseen = unseen_errors()

    def fail() -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        raise ValueError("nobody asks for it any more")

    begun = threading.Event()
    running = asyncio.create_task(pipeline_of(app()).pools.pictures.run(fail, Deadline(time.monotonic() + PATIENCE)))
    await until(begun.is_set)
    running.cancel()
    await settle()
    assert not running.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await unseen() == []


@on_a_loop
async def test_an_error_while_waiting_for_the_caller_to_leave_is_raised_and_the_work_cancelled() -> None:
    work = asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        raise MalformedRequest("broken after its end")

    with pytest.raises(MalformedRequest):
        await unless_disconnected(receive, work)
    assert work.cancelled()


@on_a_loop
async def test_cancelling_a_request_cancels_its_work_and_is_not_swallowed() -> None:
    work = asyncio.get_running_loop().create_future()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    running = asyncio.create_task(unless_disconnected(receive, work))
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert work.cancelled()


def unseen_errors() -> Callable[[], Awaitable[list[str]]]:
    """From now on, the errors of tasks and futures that nobody looks at."""
    found: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))

    async def collect() -> list[str]:
        await settle()
        gc.collect()
        return found

    return collect
