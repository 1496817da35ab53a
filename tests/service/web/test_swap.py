"""Requests while the model is swapped: a single model answers each."""

import asyncio
from typing import Any

import pytest

from service.models.version import Version
from service.settings import load_settings
from tests.needs import needs
from tests.service.fakes import SIZE, model_info, on_a_loop, png, until
from tests.service.web.apps import App, kept, service_in
from tests.service.web.fake_engine import FakeEngine
from tests.service.web.named_models import several

LABELS = tuple(f"other {index}" for index in range(10))


def other_model() -> FakeEngine:
    """Return a model with other labels and another input size."""
    info = model_info(name="other", labels=LABELS)
    size = (2 * SIZE, SIZE)
    preprocess = info.preprocess.model_copy(update={"size": size, "resize_size": size})
    config = info.config.model_copy(update={"image_size": size})
    return FakeEngine(model_info(name="other", labels=LABELS, preprocess=preprocess, config=config))


def swap(service: App, engine: FakeEngine) -> Version[Any]:
    """Swap the model; return the previous version."""
    model = service_in(service).models.default
    before = model.current
    model.current = Version(engine, 2)
    return before


def named(answer: dict[str, Any]) -> tuple[str, str]:
    return answer["model"], answer["predictions"][0]["label"]


@on_a_loop
@pytest.mark.parametrize(
    "path",
    ["/classify", pytest.param("/v2/models/fake/infer", marks=needs("inference_protocol"))],
)
async def test_a_prepared_picture_keeps_its_model(service: App, path: str) -> None:
    service.engine.gate.clear()
    headers = {"inference-header-content-length": "0"} if path.startswith("/v2") else {}
    asked = service.communicator("POST", path, headers=headers, body=png(7))
    task = asked.start()
    await until(lambda: service.engine.waiting == 1)
    old = swap(service, other_model())
    assert old.requests == 1
    assert named((await service.classify(png(7))).json) == ("other", "other 7")
    service.engine.gate.set()
    await task
    assert (asked.status, b"label 7" in asked.content, old.requests) == (200, True, 0)


@on_a_loop
async def test_a_late_body_keeps_its_first_model(
    service: App,
) -> None:
    slow = service.communicator("POST", "/classify", body=None)
    asked = slow.start()
    await until(lambda: service_in(service).models.default.current.requests == 1)
    swap(service, other_model())
    slow.feed(png(3), more=False)
    await asked
    assert named(slow.json) == ("fake", "label 3")


@on_a_loop
async def test_every_ended_request_frees_its_model(service: App) -> None:
    version = service_in(service).models.default.current
    assert (await service.classify(b"no picture")).status == 415
    service.engine.gate.clear()
    asked = service.communicator("POST", "/classify", body=png(1)).start()
    await until(lambda: service.engine.waiting == 1)
    asked.cancel()
    await asyncio.wait((asked,))
    assert version.requests == 0


@on_a_loop
async def test_kept_pictures_match_the_input_size(
    service: App,
) -> None:
    image_id = await kept(service)
    for engine, status in ((service.engine, 200), (other_model(), 404), (FakeEngine(), 200)):
        swap(service, engine)
        assert (await service.get("/attention", f"id={image_id}&format=json")).status == status


@on_a_loop
async def test_a_full_service_holds_a_found_model() -> None:
    service = App(load_settings({"queue_size": 1}))
    limiter = service_in(service).limiter
    limiter.take(1, "")
    version = service_in(service).models.default.current
    asked = service.communicator("POST", "/classify", body=png(1)).start()
    seen = set()
    while not asked.done():
        seen.add(version.requests)
        await asyncio.sleep(0)
    assert (seen, version.requests) == ({0, 1}, 0), "it waits for a slot, and is refused"


@on_a_loop
async def test_each_of_several_models_is_held() -> None:
    service, models = several()
    models.engines["few"].state = "loading"
    models.engines["few"].gate.clear()
    asked = service.communicator("POST", "/classify", query="model=cats,few", body=png(1))
    task = asked.start()
    cats = models.served["cats"].current
    await until(lambda: cats.requests == 1)
    models.engines["few"].gate.set()
    await task
    assert (asked.status, cats.requests) == (200, 0)


@on_a_loop
async def test_a_refused_query_releases_its_model(service: App) -> None:
    version = service_in(service).models.default.current
    assert (await service.classify(query="top_k=0")).status == 422
    assert (await service.classify(query="layer=1")).status == 422
    assert (await service.get("/attention", "id=unknown")).status == 404
    assert version.requests == 0
