"""The callers: each request goes through a worker's own pipeline, and each of its images gets one outcome, its own."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from model.outputs import RequestedOutputs
from service.engine.messages import InferenceRequest, InferenceResult
from service.errors import (
    ClientDisconnected,
    DeadlineExceeded,
    EngineUnavailable,
    InferenceFailed,
    QueueFull,
    ServiceError,
)
from service.web.pipeline import Pipeline
from service.web.work import all_of, unless_disconnected
from tests.simulation.device import GOOD, image, is_own
from tests.simulation.scenario import RequestPlan
from tests.simulation.scheduler import Process

if TYPE_CHECKING:
    from tests.simulation.workers import Worker
    from tests.simulation.world import World

Outcome = InferenceResult | ServiceError
_SLACK = 1.0
"""Virtual seconds after its deadline within which a request has its answer, whatever becomes of its engine."""


@dataclass(frozen=True, slots=True)
class _Deadline:
    """The moment `at` at which a request's time is up, as `Pipeline.infer` takes it."""

    at: float
    process: Process

    def remaining(self) -> float:
        return max(0.0, self.at - float(self.process.time()))


class _Request:
    """One request of a caller, from its arrival to its outcome."""

    def __init__(self, number: int, plan: RequestPlan, images: list[tuple[int, int]], process: Process) -> None:
        self.number = number
        self.plan = plan
        self.images = images
        self.process = process
        self.deadline: Any = _Deadline(process.time() + plan.timeout, process)
        self.left = process.create_future()
        self.early = False

    def leave(self) -> None:
        """Go away without waiting for the answer."""
        if not self.left.done():
            self.left.set_result(None)

    async def receive(self) -> dict[str, Any]:
        await self.left
        return {"type": "http.disconnect"}


class Requests:
    """All requests of a scenario, those that wait for an outcome among them.

    Attributes:
        gone_at: when an image's caller left, by the image's number.
    """

    def __init__(self, world: World) -> None:
        self.gone_at: dict[int, float] = {}
        self._world = world
        self._numbers = itertools.count(1)
        self._image_numbers = itertools.count(1000)
        self._to_come = 0
        self._open: dict[int, _Request] = {}
        self._unanswered: list[int] = []

    def plan(self, plans: Sequence[RequestPlan]) -> None:
        """Let requests come when their time is there."""
        self._to_come += len(plans)
        for plan in plans:
            self._world.scheduler.after(plan.at, functools.partial(self._come, plan))

    def over(self) -> bool:
        """Return whether all have come and none waits."""
        return not self._to_come and not self._open

    def probe(self) -> None:
        """Ask once through each worker and, where engines have processes of their own, each of them."""
        for worker in self._world.workers:
            for engine in worker.remotes:
                number = next(self._image_numbers)
                request = InferenceRequest(image(number, GOOD), RequestedOutputs(2))
                self._to_come += 1
                self._unanswered.append(number)
                worker.process.spawn(self._probe(engine, request, number))

    def check_all_answered(self) -> None:
        """Check that every probe had its answer."""
        if self._unanswered:
            self._world.scheduler.violate(f"a healthy service did not answer {self._unanswered}")

    async def _probe(self, engine: Any, request: InferenceRequest, number: int) -> None:
        while True:
            try:
                result = await engine.infer(request, timeout=_SLACK)
            except QueueFull:  # other probes; it has its turn
                await asyncio.sleep(0.001)
                continue
            except ServiceError as error:
                self._world.scheduler.violate(f"probe {number}: {error!r}")
                return
            break
        if not is_own(result, request):
            self._world.scheduler.violate(f"probe {number} got another's answer: {result}")
        self._to_come -= 1
        self._unanswered.remove(number)

    def worker_died(self, process: Process) -> None:
        """Forget the requests of a worker that was killed: their callers see their connections end."""
        for request in [request for request in self._open.values() if request.process is process]:
            del self._open[request.number]
            self._gone(request)

    # One request.

    def _come(self, plan: RequestPlan) -> None:
        self._to_come -= 1
        worker = self._world.workers[plan.worker]
        if not worker.process.alive:
            return
        images = [(next(self._image_numbers), kind) for kind in plan.kinds]
        request = _Request(next(self._numbers), plan, images, worker.process)
        numbers = [number for number, _ in images]
        self._world.scheduler.note("request", request.number, "images", numbers, "comes to", worker.process.name)
        self._open[request.number] = request
        worker.process.spawn(self._answer(worker, request))
        if plan.leaves_after is not None:
            worker.process.call_later(plan.leaves_after, functools.partial(self._leave, request))

    def _leave(self, request: _Request) -> None:
        if request.number in self._open:
            self._world.scheduler.note("the caller of", request.number, "leaves")
            request.leave()
            self._gone(request)

    def _gone(self, request: _Request) -> None:
        for number, _ in request.images:
            self.gone_at[number] = self._world.scheduler.now

    async def _answer(self, worker: Worker, request: _Request) -> None:
        outcomes: list[Outcome]
        pipeline = worker.pipeline
        request.early = not worker.engine.ready
        try:
            with pipeline.admit() as permit:
                for _ in request.images[1:]:
                    permit.extend()
                work = all_of(self._infer(pipeline, request, *image) for image in request.images)
                outcomes = await unless_disconnected(request.receive, work)
        except ServiceError as error:
            outcomes = [error] * len(request.images)
        except BaseException as error:  # noqa: BLE001  nothing else may come out, cancellation neither
            self._world.scheduler.violate(f"request {request.number} ends with {error!r}")
            return
        self._check(request, outcomes)

    async def _infer(self, pipeline: Pipeline, request: _Request, number: int, kind: int) -> Outcome:
        """Do the part of the route's `classify_item`."""
        plan = request.plan
        try:
            pixels = image(number, kind)
            if plan.decode:
                await asyncio.sleep(plan.decode)
            return await pipeline.infer(pixels, request.deadline, plan.requested)
        except ServiceError as error:
            if len(request.images) == 1:
                raise
            return error

    def _check(self, request: _Request, outcomes: list[Outcome]) -> None:
        world, now = self._world, self._world.scheduler.now
        if self._open.pop(request.number, None) is None:
            world.scheduler.violate(f"request {request.number} has a second outcome")
        if now > request.deadline.at + _SLACK + world.patience:
            world.scheduler.violate(f"request {request.number} is answered {now - request.deadline.at} s late")
        for (number, kind), outcome in zip(request.images, outcomes, strict=True):
            world.scheduler.note("image", number, "->", type(outcome).__name__)
            if not self._is_right(request, number, kind, outcome):
                world.scheduler.violate(f"image {number} of request {request.number} got {outcome!r}")

    def _is_right(self, request: _Request, number: int, kind: int, outcome: Outcome) -> bool:
        """Return whether an image may have this outcome at this moment."""
        plan = request.plan
        if isinstance(outcome, InferenceResult):
            return kind == GOOD and is_own(outcome, InferenceRequest(image(number, kind), plan.requested))
        if isinstance(outcome, InferenceFailed):
            return kind != GOOD or self._world.disturbed
        if isinstance(outcome, DeadlineExceeded):
            return bool(request.deadline.remaining() == 0.0)
        if isinstance(outcome, EngineUnavailable):
            computed_by = self._world.answered.get(number)
            return (request.early or self._world.disturbed) and (computed_by is None or computed_by.killed)
        if isinstance(outcome, ClientDisconnected):
            return bool(request.left.done())
        return type(outcome) is QueueFull
