"""Load on an engine process as web workers make it, without HTTP and decoding."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import uvloop

from model.outputs import RequestedOutputs
from service.cluster.remote_model import EngineClient, RemoteModels
from service.engine.messages import InferenceRequest

_TOP_K = 5
_HEAD_START = 0.5
"""Seconds between the last worker's start and the measurement, in which all come to work."""


def rate(socket: Path, *, workers: int, pictures: int, seconds: float) -> float:
    """Return images a second that the engine at a socket answers to so many worker processes.

    Args:
        pictures: under way, of all workers together.
    """
    spawn, share = multiprocessing.get_context("spawn"), -(-pictures // workers)
    with ProcessPoolExecutor(workers, spawn, initializer=_meet, initargs=(spawn.Barrier(workers),)) as pool:
        asking = [pool.submit(_work, socket, share, seconds) for _ in range(workers)]
        return sum(each.result() for each in asking) / seconds


def _meet(barrier: Barrier) -> None:
    barrier.wait()  # every process has imported this module


def _work(socket: Path, pictures: int, seconds: float) -> int:
    return uvloop.run(_ask(socket, pictures, seconds))


async def _ask(socket: Path, pictures: int, seconds: float) -> int:
    """Have so many pictures under way until the end; return how many were answered from the begin on."""
    begin = time.monotonic() + _HEAD_START
    models, connected = RemoteModels([EngineClient(socket, "auto")]), asyncio.Event()
    models.start(lambda: connected.set() if models.default.current.engine.ready else None)
    await connected.wait()
    engine = models.default.current.engine
    assert engine.info is not None, "it is ready"
    noise, shape = np.random.default_rng(0), engine.info.input_shape
    asked = RequestedOutputs(min(_TOP_K, engine.info.config.num_classes))
    requests = [InferenceRequest(noise.integers(0, 256, shape, np.uint8), asked) for _ in range(16)]
    turn, answered = itertools.cycle(requests), 0

    async def one() -> None:
        nonlocal answered
        while time.monotonic() < begin + seconds:
            await engine.infer(next(turn), timeout=60)
            answered += begin <= time.monotonic() < begin + seconds

    async with asyncio.TaskGroup() as group:
        for _ in range(pictures):
            group.create_task(one())
    await models.close()
    return answered
