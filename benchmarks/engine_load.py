"""Load on an engine process as web workers make it, without HTTP and decoding.

    python -m benchmarks.engine_load SOCKET PICTURES SECONDS < BEGIN        (one of these workers; `rate` starts them)

Each worker has its pictures under way all the time, and tells how many were answered within the seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoints import REPOSITORY
from model.outputs import RequestedOutputs
from service.cluster.remote_model import EngineClient, RemoteModels
from service.engine.messages import InferenceRequest

_TOP_K = 5
_HEAD_START = 0.5
"""Seconds between the last worker's being ready and the measurement, in which all are at work."""


def socket_in(folder: Path) -> Path:
    """Return the socket of the only engine of a service whose TMPDIR is this folder."""
    [found] = folder.glob("vitserve-*/engine-*")
    return found


def rate(socket: Path, *, workers: int, pictures: int, seconds: float) -> float:
    """Return images a second that the engine at a socket answers to so many workers.

    Args:
        pictures: under way, of all workers together.

    Raises:
        RuntimeError: a worker failed; its error is on standard error.
    """
    share = -(-pictures // workers)
    command = [sys.executable, "-m", "benchmarks.engine_load", str(socket), str(share), str(seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    started = [subprocess.Popen(command, **pipes) for _ in range(workers)]
    for process in started:
        assert process.stdout is not None
        process.stdout.readline()  # it is ready
    begin = f"{time.time() + _HEAD_START}\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write(begin)
        process.stdin.flush()
    answered = [process.communicate(timeout=seconds + 60)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError("a worker of the engine's load failed")
    return sum(map(int, answered)) / seconds


async def _ask(socket: Path, pictures: int, seconds: float) -> int:
    """Have so many pictures under way until the end; return how many were answered from the begin on."""
    models, connected = RemoteModels([EngineClient(socket, "auto")]), asyncio.Event()
    models.start(lambda: connected.set() if models.default.current.engine.ready else None)
    await connected.wait()
    engine = models.default.current.engine
    assert engine.info is not None, "it is ready"
    noise, shape = np.random.default_rng(0), engine.info.input_shape
    asked = RequestedOutputs(min(_TOP_K, engine.info.config.num_classes))
    requests = [InferenceRequest(noise.integers(0, 256, shape, np.uint8), asked) for _ in range(16)]
    turn, answered = itertools.cycle(requests), 0
    print("ready", flush=True)
    begin = float(sys.stdin.readline())

    async def one() -> None:
        nonlocal answered
        while time.time() < begin + seconds:
            await engine.infer(next(turn), timeout=60)
            answered += begin <= time.time() < begin + seconds

    async with asyncio.TaskGroup() as group:
        for _ in range(pictures):
            group.create_task(one())
    await models.close()
    return answered


if __name__ == "__main__":
    import uvloop

    path, count, duration = sys.argv[1:]
    print(uvloop.run(_ask(Path(path), int(count), float(duration))))
