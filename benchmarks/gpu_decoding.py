"""How many pictures all cores decode when they do nothing else: one of the two ceilings of HTTP."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.config import PreprocessConfig


def decode_rate(files: Sequence[bytes], config: PreprocessConfig, seconds: float) -> float:
    """Pictures per second that all cores decode when they do nothing else; one process a core."""
    cores = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(cores)
    results: Any = context.Queue()
    workers = [
        context.Process(target=_decode, args=(list(files), config.model_dump_json(), seconds, begin, results))
        for _ in range(cores)
    ]
    for worker in workers:
        worker.start()
    rates = [float(results.get(timeout=seconds + 120)) for _ in workers]
    for worker in workers:
        worker.join()
    return sum(rates)


def _decode(files: Sequence[bytes], config: str, seconds: float, begin: Any, results: Any) -> None:
    from model.config import PreprocessConfig  # noqa: PLC0415
    from model.images.preprocess import preprocess  # noqa: PLC0415

    parsed = PreprocessConfig.model_validate_json(config)
    preprocess(files[0], parsed)
    begin.wait(100)
    done, started = 0, time.perf_counter()
    while (now := time.perf_counter()) < started + seconds:
        preprocess(files[done % len(files)], parsed)
        done += 1
    results.put(done / (now - started))
