"""Maps that need a pass of their own run in batches of their own, behind classification."""

from __future__ import annotations

import asyncio

import pytest

from model.outputs import EmbeddingRequest, MapRequest
from service.engine import streams
from tests.service.engine.conftest import Running
from tests.service.fakes import PATIENCE, FakePredictor, expected_indices, on_a_loop

GAE = MapRequest("gae", 3)


@on_a_loop
async def test_a_map_of_its_own_method_and_class_comes_with_the_classes(running: Running) -> None:
    async with running() as rig:
        result = await rig.ask(5, map=GAE)
    assert result.outputs.indices.tolist() == expected_indices(5, 3)
    assert result.outputs.map is not None
    assert result.outputs.map.request == GAE


@on_a_loop
async def test_they_share_no_batch_with_classification_and_are_few_at_once(running: Running) -> None:
    async with running(FakePredictor(max_batch=20)) as rig:
        tasks = [await rig.keep_busy(0), rig.ask_soon(100, map=GAE)]
        await rig.predictor.wait_until_busy()  # beside the first one, as nothing waits
        tasks += [rig.ask_soon(red, map=GAE) for red in range(101, 112)]
        tasks += [rig.ask_soon(red, map=MapRequest.row(2)) for red in range(1, 4)]
        await rig.until_queued(14)
        rig.predictor.gate.set()
        await asyncio.gather(*tasks)
    batches = rig.predictor.launched
    assert [batch for batch in batches if batch[0] < 100] == [[0], [1, 2, 3]]
    explained = [batch for batch in batches if batch[0] >= 100]
    assert [len(batch) for batch in explained] == [1, 8, 3]
    assert [red for batch in explained for red in batch] == list(range(100, 112))


@on_a_loop
async def test_they_wait_while_another_image_waits_and_no_longer(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_EXPLANATION_WAIT", 10 * PATIENCE)
    async with running() as rig:
        first = await rig.keep_busy(0)
        second = rig.ask_soon(1)
        await rig.until_queued(1)
        explained = rig.ask_soon(100, map=GAE)
        await rig.until_queued(2)
        assert rig.predictor.launched == [[0]]
        rig.predictor.gate.set()
        await asyncio.gather(first, second, explained)
    assert sorted(rig.predictor.launched) == [[0], [1], [100]]


@on_a_loop
async def test_a_map_that_has_waited_for_long_waits_for_nobody(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_EXPLANATION_WAIT", 0.0)
    async with running() as rig:
        first = await rig.keep_busy(0)
        second = rig.ask_soon(1)
        await rig.until_queued(1)
        explained = rig.ask_soon(100, map=GAE)
        await rig.predictor.wait_until_busy()
        assert rig.predictor.launched == [[0], [100]]
        rig.predictor.gate.set()
        await asyncio.gather(first, second, explained)


@on_a_loop
async def test_what_has_something_to_load_first_holds_up_no_batch(running: Running) -> None:
    """As an answer of torch's, where the service started without it."""
    predictor, asked = FakePredictor(slow_embeddings=True), {"embedding": EmbeddingRequest("head")}
    async with running(predictor) as rig:
        tasks = [await rig.keep_busy(0), rig.ask_soon(100, **asked)]
        await predictor.wait_until_busy()  # beside the first one
        tasks += [rig.ask_soon(red, **asked) for red in (101, 102)]
        left = rig.ask_soon(103, **asked)
        await rig.until_queued(3)
        predictor.slow_embeddings = False  # it is loaded
        tasks += [rig.ask_soon(1), rig.ask_soon(2, **asked)]
        await rig.until_queued(5)
        left.cancel()
        await rig.until_queued(4)
        predictor.gate.set()
        await asyncio.gather(*tasks)
    assert sorted(predictor.launched) == [[0], [1, 2], [100], [101, 102]]
