"""What a seed stands for: the sizes of a service, who asks it for what and when, and what goes wrong meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from model.outputs import MapRequest, RequestedOutputs
from tests.simulation.device import GOOD, NAN, POISON

FaultKind = Literal[
    "kill engine", "stop engine", "device dies", "defect", "freeze engine",
    "kill worker", "freeze worker", "stall", "stranger",
]  # fmt: skip
_LOADED = 0.05
"""Seconds after the start when the first request may come; most engines are loaded then."""


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request: when it comes and to which worker, what it holds, its time, and when its caller leaves, if ever."""

    at: float
    worker: int
    kinds: tuple[int, ...]
    requested: RequestedOutputs
    decode: float
    timeout: float
    leaves_after: float | None


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong: what, when, to which engine or worker, and for how long; 0 is for good."""

    at: float
    kind: FaultKind
    target: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A service and what happens to it; seconds throughout.

    Attributes:
        engines: 0 is a service of one process, with its engine inside.
        batch_seconds: the shortest and the longest time that a batch takes.
        message_delay: the longest time that bytes take on a connection.
        wake_delay: the longest time that a notified thread takes to run.
        grid: see `Scheduler`.
    """

    workers: int
    engines: int
    queue_size: int
    capacity: int
    max_batch: int
    streams: int
    max_delay: float
    batch_seconds: tuple[float, float]
    message_delay: float
    wake_delay: float
    grid: float
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]

    @property
    def disturbs_engines(self) -> bool:
        """Return whether an engine may be missing at times."""
        return any(
            fault.kind in {"kill engine", "stop engine", "device dies", "defect", "freeze engine"}
            for fault in self.faults
        )


def scenario_of(seed: int) -> Scenario:
    """Return the scenario of a seed; the same for the same seed."""
    choose = random.Random(f"scenario {seed}")
    engines = choose.choice((0, 1, 1, 1, 2, 2, 3))
    workers = choose.choice((1, 2, 2, 3)) if engines else 1
    slowest = choose.choice((0.002, 0.01, 0.05))
    span = choose.choice((0.02, 0.1, 0.4))
    together = choose.choice((0.2, 0.8))
    queue_size = choose.choice((1, 2, 4, 8, 8))
    return Scenario(
        workers=workers,
        engines=engines,
        queue_size=queue_size,
        capacity=queue_size * choose.choice((1, 1, 2)),
        max_batch=choose.choice((1, 2, 3, 4)),
        streams=choose.choice((1, 1, 2, 3)),
        max_delay=choose.choice((0.0, 0.0, 0.004, 0.02)),
        batch_seconds=(slowest / 4, slowest),
        message_delay=choose.choice((0.0, 0.0005, 0.005)),
        wake_delay=choose.choice((0.0, 0.001)),
        grid=choose.choice((0.0, 0.0, 0.0005, 0.004)),
        requests=tuple(_request(choose, span, together, workers, slowest) for _ in range(choose.randint(3, 12))),
        faults=tuple(_fault(choose, span, slowest, workers, engines) for _ in range(choose.choice((0, 0, 1, 1, 2, 3)))),
    )


def _request(choose: random.Random, span: float, together: float, workers: int, slowest: float) -> RequestPlan:
    timeout = choose.choice((slowest, 4 * slowest, 1.0))
    return RequestPlan(
        at=_LOADED + (span / 2 if choose.random() < together else choose.random() * span),
        worker=choose.randrange(workers),
        kinds=tuple(choose.choices((GOOD, POISON, NAN), (20, 1, 1), k=choose.choice((1, 1, 1, 2, 3)))),
        requested=RequestedOutputs(
            top_k=choose.randint(1, 3),
            map=choose.choices((None, MapRequest.row(1), MapRequest("gae")), (3, 1, 2))[0],
        ),
        decode=choose.choice((0.0, 0.0, 0.001, 0.01)),
        timeout=timeout,
        leaves_after=choose.random() * min(timeout, 4 * slowest) if choose.random() < 0.3 else None,
    )


def _fault(choose: random.Random, span: float, slowest: float, workers: int, engines: int) -> Fault:
    kinds: list[FaultKind] = ["device dies", "defect", "stall"]
    if engines:
        kinds = ["kill engine", "kill engine", "stop engine", *kinds, "kill worker", "kill worker", "stranger"]
        kinds += ["freeze engine", "freeze worker"]
    kind = choose.choice(kinds)
    target = choose.randrange(workers if kind in {"kill worker", "freeze worker"} else max(1, engines))
    # At any time, or while those that came together wait.
    at = choose.random() * span if choose.random() < 0.5 else span / 2 + choose.random() * 4 * slowest
    seconds = choose.random() * 0.02
    if kind.startswith("freeze"):
        seconds = choose.choice((0.0, 10 * seconds, 100 * seconds))
    return Fault(_LOADED + at, kind, target, seconds)
