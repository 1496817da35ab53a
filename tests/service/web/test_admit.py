"""A request: deadline, slots, turns, and what a disconnect releases.

The service holds a request's data once at most, and releases it at once, without the garbage
collector.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from model.heads import ZeroShot
from service.addresses import network_of
from service.errors import InferenceFailed
from service.web import admit
from service.web.gather import all_of
from service.web.lanes import Deadline
from service.web.limiter import Permit
from tests.model.images.pictures import encode
from tests.service.fakes import PATIENCE, model_info, on_a_loop, png, until
from tests.service.web.apps import App, Clock, app, budget_of, form, service_in, settle
from tests.service.web.memory import NO_PICTURE, little_stays


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/classify/batch", "/attention"])
async def test_a_slow_body_shortens_engine_time(path: str) -> None:
    clock = Clock()
    service = app(clock, request_timeout=10)
    communicator = service.communicator(
        "POST", path, headers={"content-type": "image/png"}, body=None
    )
    running = communicator.start()
    await until(lambda: communicator.received == 1)
    clock.now += 4  # a slow body
    communicator.feed(png(1), more=False)
    await running
    assert service.engine.timeouts == [6]


@on_a_loop
async def test_a_body_past_its_deadline_is_408() -> None:
    service = app(request_timeout=0.05, queue_size=1)
    communicator = service.communicator(
        "POST", "/classify", headers={"content-type": "image/png"}, body=None
    )
    communicator.feed(png(1)[:10])
    running = communicator.start()
    await until(lambda: communicator.answered)
    assert (communicator.status, communicator.code) == (408, "request_timeout")
    assert service_in(service).limiter.in_use == 0
    assert budget_of(service).in_use == 0
    communicator.disconnect()
    await running


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/attention"])
async def test_an_engine_that_hangs_ends_in_504(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit, "LATE_SECONDS", 0.0)
    service = app(request_timeout=0.4)
    service.engine.gate.clear()
    answer = await service.classify(path=path)
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert service.engine.cancelled == 1
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_a_disconnect_frees_an_arriving_body() -> None:
    service = app(queue_size=1)
    budget_of(service).capacity = 500
    communicator = service.communicator(
        "POST", "/classify", headers={"content-type": "image/png"}, body=None
    )
    communicator.feed(png(1)[:10])
    running = communicator.start()
    await until(lambda: communicator.received == 2)
    assert budget_of(service).in_use == 10
    communicator.disconnect()
    await running
    assert not communicator.answered
    assert service_in(service).limiter.in_use == 0
    assert budget_of(service).in_use == 0
    assert service.metric("vit_cancelled_total") == 1
    assert service.metric("vit_inflight_requests") == 0
    assert (await service.classify()).status == 200


@on_a_loop
async def test_a_disconnect_cancels_inference() -> None:
    service = app(queue_size=1)
    service.engine.gate.clear()
    communicator = service.communicator(
        "POST", "/classify", headers={"content-type": "image/png"}, body=png(1)
    )
    running = communicator.start()
    await until(lambda: service.engine.waiting == 1)
    assert service.metric("vit_inflight_requests") == 1
    communicator.disconnect()
    await running
    assert not communicator.answered
    assert service.engine.cancelled == 1
    assert service_in(service).limiter.in_use == 0
    assert service.metric("vit_cancelled_total") == 1
    assert service.metric("vit_inflight_requests") == 0


def decoded_by(service: App) -> float:
    return service.metric("vit_stage_duration_seconds_count", stage="decode")


def gif(red: int) -> bytes:
    """Return a picture that a process decodes instead of a thread."""
    return encode(Image.new("RGB", (8, 8), (red, 0, 0)), "GIF")


@on_a_loop
@pytest.mark.parametrize("picture", [png, gif])
async def test_decoding_runs_four_batches_ahead(
    picture: Callable[[int], bytes],
) -> None:
    service = app()
    service.engine.info = model_info(max_batch=1)
    service_in(service).decoders.processes = 1
    service.engine.gate.clear()
    callers = [asyncio.create_task(service.classify(picture(red))) for red in range(6)]
    await until(lambda: service.engine.waiting == 4)
    await settle()
    assert decoded_by(service) == 4
    callers[0].cancel()
    await until(lambda: decoded_by(service) == 5)
    service.engine.gate.set()
    assert [each.status for each in await asyncio.gather(*callers[1:])] == [200] * 5
    assert decoded_by(service) == 6
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_a_launched_picture_may_be_late() -> None:
    service = app(request_timeout=0.2)
    service.engine.gate.clear()
    answer = asyncio.create_task(service.classify())
    await until(lambda: service.engine.waiting == 1)
    await asyncio.sleep(0.3)
    service.engine.gate.set()
    assert (await answer).status == 200


@on_a_loop
async def test_a_finished_picture_frees_its_slot() -> None:
    service = app(queue_size=3)
    service.engine.gate.clear()
    batch = service.communicator(
        "POST", "/classify/batch", **form(b"GIF89a nothing", png(1), b"\xff\xd8\xff nothing")
    )
    running = batch.start()
    await until(lambda: service.engine.waiting == 1 and service_in(service).limiter.in_use == 1)
    others = [asyncio.create_task(service.classify(png(2))) for _ in range(2)]
    await until(lambda: service.engine.waiting == 3)
    service.engine.gate.set()
    assert [(await other).status for other in others] == [200, 200]
    await running
    assert ["error" in each for each in batch.json["results"]] == [True, False, True]
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_a_batch_lends_slots_as_it_lines_up() -> None:
    service = app(queue_size=2)
    limiter = service_in(service).limiter
    permit = Permit(limiter)
    other = service.communicator("POST", "/classify", body=png(1))
    with permit:
        permit.extend(2)
        answered = other.start()
        await asyncio.sleep(0)
        with permit.lent():
            await answered
    assert other.status == 200


@on_a_loop
async def test_waiting_in_a_lane_lends_the_slot() -> None:
    service = app(queue_size=2)
    inside = service_in(service)
    lane = inside.lanes.explanations
    turns = [lane.turn("other", 1, Deadline(inside.clock() + PATIENCE)) for _ in range(16)]
    answer = asyncio.create_task(
        service.classify(query="method=relevance&class=1&format=json", path="/attention")
    )
    await until(lambda: lane.waiting == 1)
    assert inside.limiter.in_use == 0
    with (
        inside.limiter.permit(),
        inside.limiter.permit(),
    ):  # other requests fill the service meanwhile
        for turn in turns:
            turn.__exit__()
        assert (await answer).status == 200
    assert inside.limiter.in_use == 0


@on_a_loop
@pytest.mark.parametrize(
    ("picture", "waiting"), [(png, 37), (gif, 3)], ids=["threads", "processes"]
)
async def test_a_batch_delays_only_its_own_caller(
    picture: Callable[[int], bytes], waiting: int
) -> None:
    service = app(queue_size=64)
    service.engine.info = model_info(max_batch=1)
    service_in(service).decoders.processes = 2
    service.engine.gate.clear()
    batch = service.communicator(
        "POST", "/classify/batch", **form(*(picture(red) for red in range(40)))
    )
    running = batch.start()
    await until(lambda: service.engine.waiting == 4)
    other = service.communicator(
        "POST", "/classify", headers={"content-type": "image/png"}, body=png(77)
    )
    other.scope["client"] = ("127.0.0.2", 1)
    asked = other.start()
    await until(lambda: service_in(service).lanes.pictures.waiting == waiting)
    assert service_in(service).limiter.in_use <= 6, "a waiting picture holds no slot"
    service.engine.gate.set()
    await asked
    assert not running.done()
    assert other.json["predictions"][0]["index"] == 7
    await running
    assert len(batch.json["results"]) == 40


@on_a_loop
@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/classify", "attention=relevance"),
        ("/classify", "labels=cat,dog&attention=relevance"),
        ("/attention", ""),
    ],
)
async def test_maps_run_four_batches_ahead_at_most(
    path: str, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = app(queue_size=64)

    async def embed_texts(texts: Sequence[str], *, timeout: float) -> np.ndarray:
        return np.ones((len(texts), 8), np.float32)

    monkeypatch.setattr(service.engine, "embed_texts", embed_texts)
    service.engine.info = model_info(max_batch=1, zero_shot=ZeroShot(1.0, 0.0, False, ("{}",)))
    service.engine.gate.clear()
    callers = [asyncio.create_task(service.classify(png(red), query, path)) for red in range(9)]
    await until(lambda: service.engine.waiting == 4)
    await settle()
    assert service.engine.waiting == 4
    service.engine.gate.set()
    assert {each.status for each in await asyncio.gather(*callers)} == {200}
    assert service_in(service).limiter.in_use == 0


@on_a_loop
async def test_all_of_ends_the_others_on_an_error() -> None:
    ended: list[str] = []

    async def returns(value: int, turns: int = 0) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    async def hangs() -> int:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hangs")
        return 0

    async def fails() -> int:
        raise InferenceFailed("this one")

    assert await all_of([returns(1, turns=3), returns(2), returns(3, turns=1)]) == [1, 2, 3]
    with pytest.raises(InferenceFailed, match="this one"):
        await all_of([hangs(), fails(), hangs()])
    assert ended == ["hangs"] * 2


def classify() -> dict[str, Any]:
    return {"path": "/classify", "headers": {"content-type": "image/png"}, "body": NO_PICTURE}


def classify_batch() -> dict[str, Any]:
    return {"path": "/classify/batch", **form(NO_PICTURE, b"x")}


@on_a_loop
@pytest.mark.parametrize(("make", "status"), [(classify, 415), (classify_batch, 200)])
async def test_http_frees_a_refused_picture(
    make: Callable[[], dict[str, Any]], status: int
) -> None:
    service = app()
    request = make()
    assert (await service.request("POST", **request)).status == status  # objects that are made once
    async with little_stays():
        assert (await service.request("POST", **request)).status == status


@pytest.mark.parametrize(
    ("address", "caller"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::what:a:proxy:sends", "::what:a:proxy:sends"),
    ],
)
def test_an_ipv6_caller_is_its_network(address: str, caller: str) -> None:
    assert network_of(address) == caller


@on_a_loop
async def test_loading_to_describe_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    running = app()
    service = service_in(running)
    charged: list[str] = []

    async def load(name: str | None, caller: str = "") -> None:
        charged.append(caller)

    monkeypatch.setattr(service.models, "needs_load", lambda _: True)
    monkeypatch.setattr(service.models, "load", load)
    for caller in ("10.0.0.7", ""):
        deadline = Deadline(running.clock() + 9, running.clock)
        (await admit.acquire(service, None, deadline, caller)).release()
    assert charged == ["10.0.0.7", "unnamed"]
