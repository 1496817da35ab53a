"""The engine's promise: every submitted image gets one outcome, its own.

Maps that need their own pass have separate batches, after classification. The features of a text
are computed once, within bounds, while batches of images run.
"""

import asyncio
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest

from model.outputs import EmbeddingRequest, MapRequest
from service.engine import streams
from service.engine.texts import Floats, TextFeatures
from service.errors import DeadlineExceeded, EngineUnavailable, InferenceFailed
from tests.service.engine.conftest import Running
from tests.service.fakes import (
    BAD,
    NAN,
    PATIENCE,
    FakePredictor,
    Rig,
    expected_indices,
    on_a_loop,
    text_feature,
)
from tests.service.fakes import running as running_engine


@on_a_loop
async def test_images_keep_their_own_outputs(running: Running) -> None:
    async with running() as rig:
        first = await rig.keep_busy()
        one = rig.ask_soon(1, top_k=1)
        seven = rig.ask_soon(2, top_k=7, map=MapRequest.attention_row(2, "max"))
        await rig.until_queued(2)
        rig.predictor.gate.set()
        a = await one
        b = await seven
        await first
    assert rig.predictor.launched[1] == [1, 2]
    assert (a.outputs.indices.tolist(), a.outputs.map) == (expected_indices(1, 1), None)
    assert b.outputs.indices.tolist() == expected_indices(2, 7)
    assert b.outputs.map is not None
    assert (b.outputs.map.request, b.outputs.map.kept_mass) == (
        MapRequest.attention_row(2, "max"),
        2 / 256,
    )


@on_a_loop
async def test_a_delay_waits_for_a_full_batch(running: Running) -> None:
    async with running(FakePredictor(max_batch=3), max_delay=3600) as rig:
        tasks = [rig.ask_soon(red, timeout=7200) for red in (1, 2)]
        await rig.until_queued(2)
        assert rig.predictor.launched == []
        tasks.append(rig.ask_soon(3, timeout=7200))
        await asyncio.gather(*tasks)
    assert rig.predictor.launched == [[1, 2, 3]]
    assert [report.release for report in rig.reports] == ["full"]


@on_a_loop
async def test_a_busy_device_delays_no_deadline(
    running: Running,
) -> None:
    async with running() as rig:
        first = await rig.keep_busy(0)
        with pytest.raises(DeadlineExceeded):
            await rig.ask(1, timeout=0.01)
        # The device is still busy: the caller did not wait for it.
        assert not first.done()
        rig.predictor.gate.set()
        await first
        await rig.ask(2)
    assert rig.predictor.launched == [[0], [2]]


@on_a_loop
async def test_waiting_images_expire_each_in_turn(running: Running) -> None:
    async with running() as rig:
        first = await rig.keep_busy(0)
        waiting = [rig.ask_soon(1, timeout=seconds) for seconds in (0.03, 0.01, 0.02)]
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 3
        rig.predictor.gate.set()
        await first
    assert rig.predictor.launched == [[0]]


@on_a_loop
async def test_a_launched_image_is_answered_late(running: Running) -> None:
    async with running() as rig:
        rig.predictor.gate.clear()
        launched_in_time = rig.ask_soon(1, timeout=0.05)
        await rig.predictor.wait_until_busy()
        with pytest.raises(DeadlineExceeded):
            await rig.ask(2, timeout=0.1)  # by now the first one has expired, too
        rig.predictor.gate.set()
        assert (await launched_in_time).outputs.indices.tolist() == expected_indices(1, 3)


@on_a_loop
@pytest.mark.parametrize("fault", [BAD, NAN], ids=["it fails on it", "its scores are no numbers"])
async def test_one_bad_image_fails_alone(fault: int, running: Running) -> None:
    async with running() as rig:
        first = await rig.keep_busy(0)
        tasks = [rig.ask_soon(red) for red in (1, fault, 3)]
        await rig.until_queued(3)
        rig.predictor.gate.set()
        one, bad, three = await asyncio.gather(*tasks, return_exceptions=True)
        await first
        after = await rig.ask(4)
    assert isinstance(bad, InferenceFailed)
    for red, result in ((1, one), (3, three), (4, after)):
        assert not isinstance(result, BaseException)
        assert result.outputs.indices.tolist() == expected_indices(red, 3)
    assert rig.engine.status.state == "closed"


GAE = MapRequest("gae", 3)


@on_a_loop
@pytest.mark.parametrize(
    ("seconds", "sizes"), [(0.0, [1, 8, 3]), (0.04, [1, 2, 8, 1])], ids=["quick", "slow at first"]
)
async def test_explanations_run_in_own_batches(
    seconds: float, sizes: list[int], running: Running
) -> None:
    readings = [0.0]
    async with running(FakePredictor(max_batch=20), clock=lambda: readings[0]) as rig:
        tasks = [await rig.keep_busy(0), rig.ask_soon(100, map=GAE)]
        await (
            rig.predictor.wait_until_busy()
        )  # while the first text computes, because no image waits
        tasks += [rig.ask_soon(red, map=GAE) for red in range(101, 112)]
        tasks += [rig.ask_soon(red, map=MapRequest.attention_row(2)) for red in range(1, 4)]
        await rig.until_queued(14)
        readings[0] = seconds
        rig.predictor.gate.set()
        _, explanation, *_ = await asyncio.gather(*tasks)
    assert explanation.outputs.indices.tolist() == expected_indices(100, 3)
    assert explanation.outputs.map is not None
    assert explanation.outputs.map.request == GAE
    batches = rig.predictor.launched
    assert [batch for batch in batches if batch[0] < 100] == [[0], [1, 2, 3]]
    explained = [batch for batch in batches if batch[0] >= 100]
    assert [len(batch) for batch in explained] == sizes
    assert [red for batch in explained for red in batch] == list(range(100, 112))


@on_a_loop
@pytest.mark.parametrize(("longest", "at_first"), [(10 * PATIENCE, [[0]]), (0.0, [[0], [100]])])
async def test_explanations_wait_for_images(
    longest: float, at_first: list[list[int]], running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MAX_EXPLANATION_WAIT", longest)
    async with running() as rig:
        first = await rig.keep_busy(0)
        second = rig.ask_soon(1)
        await rig.until_queued(1)
        explained = rig.ask_soon(100, map=GAE)
        await (rig.until_queued(2) if longest else rig.predictor.wait_until_busy())
        assert rig.predictor.launched == at_first
        rig.predictor.gate.set()
        await asyncio.gather(first, second, explained)
    assert sorted(rig.predictor.launched) == [[0], [1], [100]]


@on_a_loop
async def test_a_slow_output_delays_no_batch(running: Running) -> None:
    """If the service started without torch, an answer of torch is an example."""
    predictor = FakePredictor(slow_embeddings=True)
    asked = {"embedding": EmbeddingRequest("head")}
    async with running(predictor) as rig:
        tasks = [await rig.keep_busy(0), rig.ask_soon(100, **asked)]
        await predictor.wait_until_busy()  # while the first computes
        tasks += [rig.ask_soon(red, **asked) for red in (101, 102)]
        left = rig.ask_soon(103, **asked)
        await rig.until_queued(3)
        predictor.slow_embeddings = False  # torch is loaded
        tasks += [rig.ask_soon(1), rig.ask_soon(2, **asked)]
        await rig.until_queued(5)
        left.cancel()
        await rig.until_queued(4)
        predictor.gate.set()
        await asyncio.gather(*tasks)
    assert [1, 2] in predictor.launched
    assert sorted(chain(*predictor.launched)) == [0, 1, 2, 100, 101, 102]


async def embed(rig: Rig, *texts: str, timeout: float = PATIENCE) -> Floats:
    return await rig.engine.embed_texts(texts, timeout=timeout)


def embed_soon(rig: Rig, *texts: str) -> asyncio.Task[Floats]:
    return asyncio.create_task(embed(rig, *texts))


@on_a_loop
async def test_each_text_is_computed_once(
    running: Running,
) -> None:
    async with running() as rig:
        rows = await embed(rig, "cat", "bed", "cat")
        np.testing.assert_array_equal(
            rows, [text_feature("cat"), text_feature("bed"), text_feature("cat")]
        )
        rows = await embed(rig, "ace", "cat")
        np.testing.assert_array_equal(rows, [text_feature("ace"), text_feature("cat")])
        both = await asyncio.gather(embed(rig, "new", "cat"), embed(rig, "cat", "new"))
        np.testing.assert_array_equal(both[0], both[1][::-1])
    assert rig.predictor.embedded == [["cat", "bed"], ["ace"], ["new"]]


@on_a_loop
async def test_many_texts_do_not_delay_a_few() -> None:
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
async def test_late_texts_are_never_computed(
    running: Running,
) -> None:
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
async def test_equal_texts_share_one_computation() -> None:
    texts = [f"many {number}" for number in range(500)]
    async with running_engine() as rig:
        rig.predictor.gate.clear()
        impatient = embed_soon(rig, *texts)
        pictures = [embed_soon(rig, *texts) for _ in range(8)]
        await rig.predictor.wait_until_busy()
        impatient.cancel()
        rig.predictor.gate.set()
        for rows in await asyncio.gather(*pictures):
            np.testing.assert_array_equal(
                rows[[0, -1]], [text_feature(texts[0]), text_feature(texts[-1])]
            )
    assert (
        sum(map(len, rig.predictor.embedded)) <= len(texts) + 16
    )  # and a chunk for the cancelled request


@on_a_loop
async def test_a_failing_text_fails_alone(running: Running) -> None:
    async with running() as rig:
        bad, good = await asyncio.gather(
            embed(rig, "bad"), embed(rig, "good"), return_exceptions=True
        )
        assert isinstance(bad, InferenceFailed)
        np.testing.assert_array_equal(good, [text_feature("good")])


@on_a_loop
async def test_an_engine_that_closes_refuses_texts(running: Running) -> None:
    async with running() as rig:
        rig.predictor.gate.clear()
        computed = embed_soon(rig, "computed")
        waiting = embed_soon(rig, "waiting")
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
async def test_the_oldest_features_are_evicted() -> None:
    computed: list[str] = []

    def tower(texts: Sequence[str]) -> Floats:
        computed.extend(texts)
        return np.zeros((len(texts), 10 << 18), np.float32)  # three fit, of 10 MiB each

    features = TextFeatures()
    for text in ("a", "b", "c", "a", "d", "a", "b"):  # "b" is the oldest when "d" arrives
        await features.embed([text], tower, timeout=PATIENCE)
    assert computed == ["a", "b", "c", "d", "b"]
    features.close()
