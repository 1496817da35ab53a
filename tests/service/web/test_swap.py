"""Requests while the model is swapped: each is answered wholly by one model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from service.engine.backbones import What
from service.models.model import Generation, ServedModel
from service.settings import load_settings
from tests.service.fakes import SIZE, FixedModels, model_info, on_a_loop, png, until
from tests.service.web.apps import App, kept
from tests.service.web.fake_engine import FakeEngine

LABELS = tuple(f"other {index}" for index in range(10))


def other_model() -> FakeEngine:
    """One with other labels and another input size."""
    info = model_info(name="other", labels=LABELS)
    size = (2 * SIZE, SIZE)
    preprocess = info.preprocess.model_copy(update={"size": size, "resize_size": size})
    config = info.config.model_copy(update={"image_size": size})
    return FakeEngine(model_info(name="other", labels=LABELS, preprocess=preprocess, config=config))


class FakeSwap(ServedModel):
    """Swaps at once, for the engine that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.old, self.new = FakeEngine(), other_model()
        self.current = Generation(self.old)
        self.on_change: Any = lambda: None

    async def load(self, checkpoint: What) -> None:
        self.current = Generation(self.new if checkpoint is None else FakeEngine())
        self.on_change()


class Swaps(FixedModels):
    served: dict[str, FakeSwap]  # type: ignore[assignment]  # a dict of what a test swaps

    def start(self, on_change: Any) -> None:
        self.served[""].on_change = on_change
        on_change()


class Swapped(App):
    """An application whose model can be swapped."""

    swap: FakeSwap


def swapping(**settings: Any) -> Swapped:
    swap = FakeSwap()
    service = Swapped(load_settings({**settings}), models=Swaps({"": swap}))
    service.swap = swap
    return service


@asynccontextmanager
async def lifespan(service: App) -> AsyncIterator[None]:
    """As a server starts and ends the application."""
    inbox: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    inbox.put_nowait({"type": "lifespan.startup"})
    running = asyncio.create_task(service.asgi({"type": "lifespan", "state": {}}, inbox.get, send))
    await until(lambda: bool(sent))
    yield
    inbox.put_nowait({"type": "lifespan.shutdown"})
    await running


def named(answer: dict[str, Any]) -> tuple[str, str]:
    return answer["model"], answer["predictions"][0]["label"]


@on_a_loop
@pytest.mark.parametrize("path", ["/classify", "/v2/models/fake/infer"])
async def test_a_picture_that_was_prepared_for_the_old_model_is_answered_by_it_after_the_swap(path: str) -> None:
    service = swapping()
    service.swap.old.gate.clear()
    headers = {"inference-header-content-length": "0"} if path.startswith("/v2") else {}
    old = service.communicator("POST", f"{path}", headers=headers, body=png(7))
    asked = old.start()
    await until(lambda: service.swap.old.waiting == 1)
    generation = service.swap.current
    assert generation.requests == 1
    await service.swap.load(None)
    assert named((await service.classify(png(7))).json) == ("other", "other 7")
    service.swap.old.gate.set()
    await asked
    assert old.status == 200
    assert b"label 7" in old.content
    assert generation.requests == 0


@on_a_loop
async def test_a_request_whose_body_comes_after_the_swap_belongs_to_the_model_at_its_head() -> None:
    service = swapping()
    slow = service.communicator("POST", "/classify", body=None)
    asked = slow.start()
    await until(lambda: service.swap.current.requests == 1)
    await service.swap.load(None)
    slow.feed(png(3), more=False)
    await asked
    assert named(slow.json) == ("fake", "label 3")


@on_a_loop
async def test_requests_that_end_otherwise_let_go_of_their_model_too() -> None:
    service = swapping()
    generation = service.swap.current
    assert (await service.classify(b"no picture")).status == 415
    service.swap.old.gate.clear()
    asked = service.communicator("POST", "/classify", body=png(1)).start()
    await until(lambda: service.swap.old.waiting == 1)
    asked.cancel()
    await asyncio.wait((asked,))
    assert generation.requests == 0


@on_a_loop
async def test_kept_pictures_of_another_input_size_are_unknown_and_others_are_not() -> None:
    service = swapping()
    image_id = await kept(service)
    assert (await service.get("/attention", f"id={image_id}&format=json")).status == 200
    await service.swap.load(None)
    assert (await service.get("/attention", f"id={image_id}&format=json")).code == "not_found"
    await service.swap.load("of the first size")
    assert (await service.get("/attention", f"id={image_id}&format=json")).status == 200


@on_a_loop
async def test_everything_that_describes_the_model_follows() -> None:
    async def described() -> list[Any]:
        model = (await service.get("/model")).json
        labels = (await service.get("/labels")).json["labels"]
        lines = service.metrics.render().decode().splitlines()
        [metric] = [line for line in lines if line.startswith("vit_model_info{")]
        return [model["name"], model["input_size"], labels[1], f'model="{model["name"]}"' in metric]

    service = swapping()
    async with lifespan(service):
        assert await described() == ["fake", [SIZE, SIZE], "label 1", True]
        await service.swap.load(None)
        assert await described() == ["other", [2 * SIZE, SIZE], "other 1", True]
        assert (await service.get("/v2/models/fake")).status == 404
        metadata = (await service.get("/v2/models/other")).json
        assert metadata["inputs"][1]["shape"] == [-1, 2 * SIZE, SIZE, 3]
