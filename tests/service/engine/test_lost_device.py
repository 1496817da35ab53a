"""An engine whose device hangs or dies: a stand-in does what a GPU would, and the engine says so and ends."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from model.errors import NewProcessNeeded
from model.outputs import RequestedOutputs
from model.runtime.predictor import Predictor
from service.engine.local import LocalEngine
from service.engine.messages import InferenceRequest
from service.errors import EngineUnavailable
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.test_predictor import make_checkpoint
from tests.service.fakes import PATIENCE, model_info, on_a_loop

REQUEST = InferenceRequest(np.zeros((16, 24, 3), np.uint8), RequestedOutputs(1))


def on_stand_in(ops: StandInOps) -> Predictor:
    return Predictor(make_checkpoint(), device="cpu", dtype="float32", max_batch=2, streams=2, ops=ops)


@asynccontextmanager
async def serving(
    predictor: Predictor, *, batch_seconds: float = math.inf, state: str = "ready"
) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(
        lambda: (predictor, model_info()),
        device="cuda",
        queue_size=8,
        max_delay=0,
        batch_seconds=batch_seconds,
        on_batch=lambda _: None,
    )
    changed = asyncio.Event()
    engine.start(changed.set)
    await changed.wait()
    assert engine.status.state == state
    yield engine
    await engine.close()


@on_a_loop
async def test_a_device_that_died_ends_the_engine_at_the_first_batch() -> None:
    ops = StandInOps()
    async with serving(on_stand_in(ops)) as engine:
        ops.dead = "an illegal memory access was encountered"
        with pytest.raises(EngineUnavailable, match=r"the device failed: .*illegal memory access"):
            await engine.infer(REQUEST, timeout=PATIENCE)
        await asyncio.to_thread(engine._thread.join, PATIENCE)
        await asyncio.sleep(0)
        assert engine.status.state == "failed"


@on_a_loop
async def test_what_a_new_process_is_to_do_otherwise_is_known_when_the_engine_has_ended() -> None:
    ops = StandInOps()
    ops.fail_capture = RuntimeError("a kernel cannot be captured")
    async with serving(on_stand_in(ops), state="failed") as engine:
        failure = engine.failure
        assert isinstance(failure, NewProcessNeeded)
        assert (failure.option, failure.value) == ("compile", "no-graphs")
