"""A worker's part in a swap: when it turns to the next engines, and what it hears of a load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from model.outputs import RequestedOutputs
from service.cluster.remote_swap import RemoteSwap
from service.cluster.swap_board import SwapBoard, Verdict
from service.engine.messages import InferenceRequest
from service.errors import CheckpointRefused, ServiceError, SwapUnderWay
from tests.service.fakes import model_info, on_a_loop, pixels
from tests.service.web.fake_engine import FakeEngine


class Group(FakeEngine):
    """A group's engine, which a test lets change."""

    def __init__(self, name: str) -> None:
        super().__init__(model_info(name=name))
        self.on_change: Callable[[], None] = lambda: None
        self.members: tuple[FakeEngine, ...] = (self,)

    @property
    def engines(self) -> Sequence[Any]:
        return self.members

    def start(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change

    def becomes(self, state: str) -> None:
        self.state = state
        self.on_change()


class Worker:
    """The second of two workers."""

    def __init__(self) -> None:
        self.board = SwapBoard("configured", workers=2)
        self.groups = Group("old"), Group("new")
        self.groups[1].state = "loading"
        self.woken = 0
        self.changes: list[str] = []
        self.swap = RemoteSwap(self.board, 1, self.groups, self.wake)
        self.swap.start(
            lambda: self.changes.append(self.swap.current.engine.info.name if self.swap.current.engine.info else "")
        )

    def wake(self) -> None:
        self.woken += 1


@on_a_loop
async def test_a_worker_turns_to_the_next_engines_when_they_are_current_and_it_hears_them() -> None:
    worker = Worker()
    worker.groups[1].becomes("ready")
    assert (worker.swap.current.engine.info and worker.swap.current.engine.info.name, worker.woken) == ("old", 1)
    worker.board.take_over()
    assert worker.board.all_adopted(worker.board._adopted < 0) is True  # nobody serves
    worker.groups[1].state = "loading"
    worker.swap.adopt()  # the news came before the engine's
    assert worker.changes == []
    worker.groups[1].becomes("ready")
    assert worker.changes == ["new"]
    assert worker.board._adopted.tolist() == [0, 1]
    worker.groups[0].becomes("closed")
    assert worker.changes == ["new"]
    assert worker.swap.current.engine.ready


@on_a_loop
async def test_a_worker_whose_engine_was_down_when_the_next_took_over_does_not_stay_with_it() -> None:
    worker = Worker()
    worker.groups[0].becomes("failed")
    worker.groups[1].becomes("ready")
    worker.board.take_over()
    worker.groups[0].becomes("closed")
    assert worker.changes == ["old", "old", "new"]
    assert worker.swap.current.engine.ready


@on_a_loop
async def test_the_supervisor_hears_when_the_last_request_of_the_old_engines_has_ended() -> None:
    worker = Worker()
    old = worker.swap.current
    with old.request():
        with old.request():
            assert worker.board.in_progress(0) == 2
        worker.board.take_over()
        worker.groups[1].becomes("ready")
        worker.woken = 0
        result = await old.engine.infer(InferenceRequest(pixels(3), RequestedOutputs(1)), timeout=1)
        assert result.outputs.indices.tolist() == [3]
        with worker.swap.current.request():
            assert worker.board.in_progress(1) == 1
        assert worker.woken == 0
    assert (worker.board.in_progress(0), worker.woken) == (0, 1)


@on_a_loop
@pytest.mark.parametrize(
    ("verdict", "error"),
    [(Verdict.SERVED, None), (Verdict.REFUSED, CheckpointRefused), (Verdict.UNDER_WAY, SwapUnderWay)],
)
async def test_a_load_is_asked_of_the_supervisor_and_ends_with_its_answer(
    verdict: Verdict, error: type[ServiceError] | None
) -> None:
    worker = Worker()
    assert worker.swap.reloads == (0, 0, True)
    loading = asyncio.create_task(worker.swap.load("next"))
    await asyncio.sleep(0)
    [request] = worker.board.requests()
    assert (request.worker, request.checkpoint, worker.woken) == (1, "next", 1)
    with pytest.raises(SwapUnderWay):
        await worker.swap.load("another")
    worker.board.reply(request, verdict, "why")
    outcome: Any = (await asyncio.gather(loading, return_exceptions=True))[0]
    assert (outcome is None) if error is None else (type(outcome) is error and str(outcome) == "why")
    again = asyncio.create_task(worker.swap.load(None))
    await asyncio.sleep(0)
    assert [(request.ticket, request.checkpoint) for request in worker.board.requests()] == [(2, "")]
    again.cancel()


@on_a_loop
async def test_of_several_devices_each_engine_must_be_ready() -> None:
    worker = Worker()
    first, second = Group("first"), Group("second")
    second.state = "loading"
    worker.groups[1].members = (first, second)
    worker.board.take_over()
    worker.swap.adopt()
    assert worker.swap.current.engine.info is not None
    assert worker.swap.current.engine.info.name == "old"
    second.state = "ready"
    worker.swap.adopt()
    assert worker.swap.current.engine.info.name == "new"


@on_a_loop
async def test_changes_of_the_current_engine_are_told_and_all_are_closed() -> None:
    worker = Worker()
    worker.groups[0].becomes("failed")
    assert (worker.changes, worker.woken) == (["old"], 0)
    await worker.swap.close()
    assert [group.state for group in worker.groups] == ["closed", "closed"]


def test_a_worker_that_is_started_again_begins_with_the_current_engines() -> None:
    board = SwapBoard("configured", workers=1)
    board.take_over()
    swap = RemoteSwap(board, 0, [Group("old"), Group("new")], lambda: None)
    assert swap.current.engine.info is not None
    assert swap.current.engine.info.name == "new"
    assert board._adopted.tolist() == [1]
