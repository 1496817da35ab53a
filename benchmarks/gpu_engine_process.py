"""Pixels through a service's engine process, without HTTP: `EngineProcess`, and the processes that it starts.

    python -m benchmarks.gpu_engine_process CLIENTS      (VIT_... as for serve; seconds to measure come line by line)

The engine is the one of `service.cluster`, and so are the shared memory and the frames. In a web worker's place each
client sends pictures of the model's size, the next one when it has an answer.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Self

_PER_CLIENT_LEAST = 8
"""Pictures under way of a client at least."""
_POLL = 0.005
"""Seconds between two looks at what is to be done."""


class EngineProcess:
    """The engine and its clients; a context manager, which ends them.

    Args:
        settings: environment of a service, `VIT_...`.
        clients: how many processes send pictures.
        left: gives the seconds that a start or a measurement may take.
    """

    def __init__(self, settings: Mapping[str, str], clients: int, left: Callable[[], float]) -> None:
        self._left = left
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_engine_process", str(clients)],
            env={**os.environ, **settings, "VIT_WORKERS": str(clients), "VIT_PORT": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        """Return at once: the engine starts beside what else starts."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the engine and its clients, and with them their memory on the device."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its children die with it
            self._process.wait()
        self._process.stdout.close()

    def rate(self, seconds: float) -> float:
        """Return the images per second of all clients together.

        Raises:
            RuntimeError: the engine is not ready, or did not answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{seconds} {self._left()}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine's process ended; what it wrote stands above")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"the engine's process: {answer['error']}")
        return float(answer["rate"])


class _Board:
    """What the clients are to do and have done, in memory that all share."""

    def __init__(self, clients: int) -> None:
        self.begin: Any = multiprocessing.RawValue("d", 0)
        self.seconds: Any = multiprocessing.RawValue("d", 0)
        self.ready: Any = multiprocessing.RawArray("i", clients)
        self.done: Any = multiprocessing.RawArray("l", clients)
        self.finished: Any = multiprocessing.RawArray("d", clients)


def _client(settings: Any, channel: Any, board: _Board, index: int) -> int:
    """Connect to the engine, and send pictures whenever there is something to measure, until this process is killed."""
    import numpy as np  # noqa: PLC0415

    from model.outputs import RequestedOutputs  # noqa: PLC0415
    from service.cluster.remote_engine import RemoteEngine  # noqa: PLC0415
    from service.engine.messages import InferenceRequest  # noqa: PLC0415

    async def work() -> None:
        engine = RemoteEngine(channel, index)
        engine.start(lambda: None)
        while not engine.ready or engine.info is None:
            await asyncio.sleep(_POLL)
        info = engine.info
        shape = (4, *info.input_shape)
        pictures = np.random.default_rng(index).integers(0, 256, shape, dtype=np.uint8)
        requests = [InferenceRequest(picture, RequestedOutputs(min(5, len(info.labels)))) for picture in pictures]
        # Two batches are computed, two wait; the queue takes no more than its size.
        each = max(_PER_CLIENT_LEAST, 4 * info.max_batch // settings.workers)
        under_way = min(each, settings.queue_size // settings.workers)
        board.ready[index] = 1
        measured = 0.0
        while True:
            begin = board.begin.value
            if begin == measured:
                await asyncio.sleep(_POLL)
                continue
            end, done = begin + board.seconds.value, 0

            async def one(number: int, begin: float, end: float) -> None:
                nonlocal done
                while time.monotonic() < end:
                    await engine.infer(requests[number % len(requests)], timeout=30)
                    done += begin <= time.monotonic() < end

            await asyncio.gather(*(one(number, begin, end) for number in range(under_way)))
            board.done[index] = done
            board.finished[index] = measured = begin

    import uvloop  # noqa: PLC0415

    uvloop.run(work())
    return 0


def main() -> int:
    """Start the engine and its clients; answer each line of seconds with a line of JSON; end when there are no more."""
    from service.cluster.engine_process import STOP  # noqa: PLC0415
    from service.cluster.processes import OperatingSystem  # noqa: PLC0415
    from service.cluster.run import engine_child  # noqa: PLC0415
    from service.cluster.shared_resources import SharedResources  # noqa: PLC0415
    from service.engine.loading import load_predictor  # noqa: PLC0415
    from service.settings import load_settings  # noqa: PLC0415

    clients = int(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine logs is no answer
    settings = load_settings({})
    shared, board, system = SharedResources(settings), _Board(clients), OperatingSystem()
    engine = system.spawn("engine", engine_child(settings, shared, 0, load_predictor).main)
    client = partial(_client, settings, shared.channels[0], board)
    pids = [system.spawn(f"client {index}", partial(client, index)) for index in range(clients)]

    ended: list[tuple[int, int]] = []

    def wait(for_all: Callable[[], bool], end: float) -> None:
        while not for_all():
            ended.extend(system.reap())
            if ended:
                raise RuntimeError(f"a process ended: (pid, code) {ended[0]}, the engine is {engine}")
            if time.monotonic() > end:
                raise RuntimeError("not ready in time")
            time.sleep(_POLL)

    def measured() -> bool:
        return all(each == board.begin.value for each in board.finished)

    for line in sys.stdin:
        seconds, left = map(float, line.split())
        end = time.monotonic() + left
        try:
            wait(lambda: all(board.ready), end)
            board.seconds.value = seconds
            board.begin.value = time.monotonic() + 0.25 * seconds  # until then it warms up
            wait(measured, end)
        except RuntimeError as error:
            print(json.dumps({"error": str(error)}), file=answers, flush=True)
            break
        print(json.dumps({"rate": sum(board.done) / seconds}), file=answers, flush=True)
    for pid, number in (*((pid, signal.SIGKILL) for pid in pids), (engine, STOP)):
        with suppress(ProcessLookupError):
            system.kill(pid, number)
    end = time.monotonic() + 10
    while time.monotonic() < end and not any(pid == engine for pid, _ in ended):
        time.sleep(_POLL)
        ended.extend(system.reap())
    shared.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
