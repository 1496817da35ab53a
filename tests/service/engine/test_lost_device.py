"""An engine whose device fails: a stand-in does what a GPU would, and the engine says so and ends."""

from __future__ import annotations

import asyncio

from model.errors import NewProcessNeeded
from model.runtime.predictor import Predictor
from service.engine.local import LocalEngine
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.test_predictor import make_checkpoint
from tests.service.fakes import model_info, on_a_loop


@on_a_loop
async def test_what_a_new_process_is_to_do_otherwise_is_known_when_the_engine_has_ended() -> None:
    ops = StandInOps()
    ops.fail_capture = RuntimeError("a kernel cannot be captured")
    predictor = Predictor(make_checkpoint(), device="cpu", dtype="float32", max_batch=2, streams=2, ops=ops)
    engine = LocalEngine(
        lambda: (predictor, model_info()), device="cuda", queue_size=8, max_delay=0, on_batch=lambda _: None
    )
    changed = asyncio.Event()
    engine.start(changed.set)
    await changed.wait()
    assert engine.status.state == "failed"
    failure = engine.failure
    assert isinstance(failure, NewProcessNeeded)
    assert (failure.option, failure.value) == ("compile", "no-graphs")
    await engine.close()
