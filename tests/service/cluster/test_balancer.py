"""Several devices, each with an engine, as one."""

from __future__ import annotations

import asyncio

import pytest

from service.cluster.remote_engine import Balancer
from service.errors import EngineUnavailable
from tests.service.cluster.engines import ask, service, until
from tests.service.fakes import expected_indices, on_a_loop


@on_a_loop
async def test_an_image_goes_to_the_engine_with_the_shortest_queue_over_all_workers() -> None:
    async with service(engines=2, slots=20) as running:
        predictors = [await running.start_engine(index) for index in (0, 1)]
        other = await running.ready_worker(1, 0)
        group = Balancer([await running.ready_worker(0, index) for index in (0, 1)])
        for predictor in predictors:
            predictor.gate.clear()
        tasks = [ask(other, red) for red in range(6)]
        await until(lambda: int(running.counters.outstanding.sum()) == 6)
        tasks += [ask(group, red) for red in range(100, 110)]
        await until(lambda: int(running.counters.outstanding.sum()) == 16)
        assert running.counters.outstanding.sum(axis=0).tolist() == [8, 8]
        assert running.counters.outstanding.tolist() == [[2, 8], [6, 0]]
        for predictor in predictors:
            predictor.gate.set()
        await asyncio.gather(*tasks)
        assert running.counters.outstanding.sum() == 0


@on_a_loop
async def test_equals_are_used_in_turn() -> None:
    async with service(engines=2) as running:
        predictors = [await running.start_engine(index) for index in (0, 1)]
        group = Balancer([await running.ready_worker(0, index) for index in (0, 1)])
        for red in range(6):
            await ask(group, red)
    assert [predictor.launched for predictor in predictors] == [[[1], [3], [5]], [[0], [2], [4]]]


@on_a_loop
async def test_while_no_engine_is_ready_the_state_is_that_of_the_first() -> None:
    async with service(engines=2) as running:
        group = Balancer([await running.worker(0, index) for index in (0, 1)])
        await running.start_engine(0)
        await until(lambda: group.ready)
        running.counters.restarts[:] = 2, 3
        running.counters.queue_depth[:] = 4, 5  # of the second one, which is not ready, nothing waits
        assert (group.status.state, group.status.queue_depth, group.status.restarts) == ("ready", 4, 5)
        running.lose_connections(running.servers[0])
        await until(lambda: not group.ready)
        assert [engine.status.state for engine in group.engines] == ["failed", "loading"]
        assert group.status.state == "failed"


@on_a_loop
async def test_a_group_is_ready_as_long_as_one_engine_is() -> None:
    async with service(engines=2) as running:
        group = Balancer([await running.worker(0, index) for index in (0, 1)])
        assert group.status.state == "loading"
        assert group.info is None
        await running.start_engine(1)
        await until(lambda: group.status.state == "ready")
        assert group.info is not None
        assert group.info.device == "cuda:1"
        assert (await ask(group, 1)).outputs.indices.tolist() == expected_indices(1, 3)
        await running.start_engine(0)
        await until(lambda: all(engine.ready for engine in group.engines))
        assert group.info.device == "cuda:0,cuda:1"
        running.lose_connections(running.servers[0])
        await until(lambda: not group.engines[1].ready)
        for red in range(4):
            assert (await ask(group, red)).outputs.indices.tolist() == expected_indices(red, 3)
        running.lose_connections(running.servers[1])
        await until(lambda: not group.engines[0].ready)
        assert group.status.state == "failed"
        with pytest.raises(EngineUnavailable, match="started again"):
            await ask(group, 1)
