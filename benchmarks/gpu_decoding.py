"""How many pictures all cores decode when they do nothing else: one of the two ceilings of HTTP."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.config import PreprocessConfig


def decode_rate(
    files: Sequence[bytes], config: PreprocessConfig, seconds: float, *, processes: int | None = None, patience: float
) -> float:
    """Pictures per second that processes decode and resize when the machine does nothing else.

    Args:
        processes: None is one a core.
        patience: seconds that all of it may take.

    Raises:
        queue.Empty: it took longer.
    """
    count = processes or len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(count)
    results: Any = context.Queue()
    work = (list(files), config.model_dump_json(), seconds, begin, results)
    workers = [context.Process(target=_decode, args=work, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    rates = [float(results.get(timeout=patience)) for _ in workers]
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
