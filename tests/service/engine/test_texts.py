"""Features of texts: each computed once, in turn with others', bounded, and beside the images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from service.engine.texts import Floats, TextFeatures
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed
from tests.service.engine.conftest import Running
from tests.service.fakes import PATIENCE, Rig, on_a_loop, text_feature
from tests.service.fakes import running as running_engine


async def embed(rig: Rig, *texts: str, timeout: float = PATIENCE) -> Floats:
    return await rig.engine.embed_texts(texts, timeout=timeout)


def embed_soon(rig: Rig, *texts: str) -> asyncio.Task[Floats]:
    return asyncio.create_task(embed(rig, *texts))


@on_a_loop
async def test_each_text_is_computed_once_and_every_caller_gets_its_own_rows(running: Running) -> None:
    async with running() as rig:
        rows = await embed(rig, "cat", "bed", "cat")
        np.testing.assert_array_equal(rows, [text_feature("cat"), text_feature("bed"), text_feature("cat")])
        rows = await embed(rig, "ace", "cat")
        np.testing.assert_array_equal(rows, [text_feature("ace"), text_feature("cat")])
        both = await asyncio.gather(embed(rig, "new", "cat"), embed(rig, "cat", "new"))
        np.testing.assert_array_equal(both[0], both[1][::-1])
    assert rig.predictor.embedded == [["cat", "bed"], ["ace"], ["new"]]


@on_a_loop
async def test_requests_take_turns_so_that_many_texts_do_not_hold_up_a_few() -> None:
    async with running_engine() as rig:
        rig.predictor.gate.clear()
        many = embed_soon(rig, *(f"many {number}" for number in range(100)))
        await rig.predictor.wait_until_busy()
        few = embed_soon(rig, "few")
        await asyncio.sleep(0)
        rig.predictor.gate.set()
        await few
        await many
    place = rig.predictor.embedded.index(["few"])
    assert place <= 2
    assert len(rig.predictor.embedded) == 8


@on_a_loop
async def test_a_text_that_is_not_computed_in_time_is_refused_and_then_dropped(running: Running) -> None:
    async with running() as rig:
        rig.predictor.gate.clear()
        first = embed_soon(rig, "first")
        await rig.predictor.wait_until_busy()
        with pytest.raises(DeadlineExceeded):
            await embed(rig, "late", timeout=0)
        left = embed_soon(rig, "left")
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        rig.predictor.gate.set()
        await first
        await embed(rig, "last")
    assert rig.predictor.embedded == [["first"], ["last"]]


@on_a_loop
async def test_callers_of_the_same_new_texts_wait_for_one_computation_until_the_last_has_left() -> None:
    texts = [f"many {number}" for number in range(500)]
    async with running_engine() as rig:
        rig.predictor.gate.clear()
        impatient = embed_soon(rig, *texts)
        pictures = [embed_soon(rig, *texts) for _ in range(8)]
        await rig.predictor.wait_until_busy()
        impatient.cancel()
        rig.predictor.gate.set()
        for rows in await asyncio.gather(*pictures):
            np.testing.assert_array_equal(rows[[0, -1]], [text_feature(texts[0]), text_feature(texts[-1])])
    assert sum(map(len, rig.predictor.embedded)) <= len(texts) + 16  # what was computed for the one who left


@on_a_loop
async def test_texts_that_the_tower_fails_on_fail_alone(running: Running) -> None:
    async with running() as rig:
        bad, good = await asyncio.gather(embed(rig, "bad"), embed(rig, "good"), return_exceptions=True)
        assert isinstance(bad, InferenceFailed)
        np.testing.assert_array_equal(good, [text_feature("good")])


@on_a_loop
async def test_an_engine_that_closes_refuses_texts(running: Running) -> None:
    async with running() as rig:
        rig.predictor.gate.clear()
        computed, waiting = embed_soon(rig, "computed"), embed_soon(rig, "waiting")
        await rig.predictor.wait_until_busy()
        closing = asyncio.create_task(rig.close())
        await asyncio.sleep(0.05)
        rig.predictor.gate.set()
        await computed
        with pytest.raises(EngineUnavailable):
            await waiting
        await closing
        with pytest.raises(EngineUnavailable):
            await embed(rig, "later")


@on_a_loop
async def test_the_memory_of_features_is_bounded_oldest_out_first() -> None:
    computed: list[str] = []

    def tower(texts: Sequence[str]) -> Floats:
        computed.extend(texts)
        return np.stack([text_feature(text) for text in texts])

    features = TextFeatures(cache_bytes=3 * 1600)
    for text in ("a", "b", "c", "a", "d", "a", "b"):  # "b" is the oldest when "d" comes
        await features.embed([text], tower, timeout=PATIENCE)
    assert computed == ["a", "b", "c", "d", "b"]
    features.close()
