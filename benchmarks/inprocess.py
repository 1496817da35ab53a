"""The limit: our preprocessing and predictor without HTTP, in the configuration that the environment names.

    python -m benchmarks.inprocess --pictures FILE... --seconds 8      (VIT_CHECKPOINT and the rest as for serve)

Prints one JSON object: images per second of decoding and computing together (the better of two ways to share the
cores), of each alone, and the median milliseconds of one picture decoded and computed alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model.images.preprocess import preprocess
from model.outputs import RequestedOutputs
from service.engine.loading import load_predictor
from service.engine.messages import ModelInfo
from service.settings import load_settings

if TYPE_CHECKING:
    from model.runtime.predictor import Predictor

_UNDER_WAY = 32
"""Pictures between decoding and their answer at once, as many as the connections of the load."""

_TOP_K = 5


class Limit:
    """One predictor and the pictures that it is given."""

    def __init__(self, predictor: Predictor, info: ModelInfo, files: list[bytes], decoders: int) -> None:
        self._predictor = predictor
        self._config = info.preprocess
        self._files = files
        self._decoders = decoders
        self._top_k = min(_TOP_K, info.config.num_classes)
        self._decoded = [self._decode(file) for file in files]

    def _decode(self, data: bytes) -> NDArray[np.uint8]:
        return preprocess(data, self._config)

    def _compute(self, pictures: list[NDArray[np.uint8]]) -> None:
        self._predictor.predict(np.stack(pictures), RequestedOutputs(self._top_k))

    def side_by_side(self, seconds: float) -> float:
        """Decode threads feed a compute thread, which takes whatever waits: images per second."""
        ready: queue.SimpleQueue[NDArray[np.uint8]] = queue.SimpleQueue()
        room = threading.Semaphore(_UNDER_WAY)
        stop = threading.Event()
        turn = itertools.cycle(self._files)
        lock = threading.Lock()

        def decode() -> None:
            while not stop.is_set():
                if not room.acquire(timeout=0.1):
                    continue
                with lock:
                    data = next(turn)
                ready.put(self._decode(data))

        threads = [threading.Thread(target=decode) for _ in range(self._decoders)]
        for thread in threads:
            thread.start()
        answered, started = 0, 0.0
        # The first part of the time warms up and is not counted.
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + 1.2 * seconds:
            if not started and now > begin + 0.2 * seconds:
                answered, started = 0, now
            batch = [ready.get()]
            while len(batch) < self._predictor.max_batch:
                try:
                    batch.append(ready.get_nowait())
                except queue.Empty:
                    break
            self._compute(batch)
            room.release(len(batch))
            answered += len(batch)
        rate = answered / (time.perf_counter() - started)
        stop.set()
        for thread in threads:
            thread.join()
        return rate

    def in_turn(self, seconds: float) -> float:
        """A whole batch is decoded on all threads, then computed: images per second."""
        turn = itertools.cycle(self._files)
        size = min(_UNDER_WAY, self._predictor.max_batch)
        with ThreadPoolExecutor(self._decoders) as pool:

            def work() -> int:
                self._compute(list(pool.map(self._decode, itertools.islice(turn, size))))
                return size

            return _rate(work, seconds)

    def decode_alone(self, seconds: float) -> float:
        """Images per second of decoding on all decode threads."""
        turn = itertools.cycle(self._files)
        with ThreadPoolExecutor(self._decoders) as pool:

            def work() -> int:
                return len(list(pool.map(self._decode, itertools.islice(turn, _UNDER_WAY))))

            return _rate(work, seconds)

    def forward_alone(self, seconds: float) -> float:
        """Images per second of full batches."""
        size = min(_UNDER_WAY, self._predictor.max_batch)
        batch = list(itertools.islice(itertools.cycle(self._decoded), size))

        def work() -> int:
            self._compute(batch)
            return size

        return _rate(work, seconds)

    def lone(self, seconds: float) -> dict[str, float]:
        """Median milliseconds of decoding one picture, of computing it, and of both."""
        decode, both = [], []
        turn = itertools.cycle(self._files)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            started = time.perf_counter()
            picture = self._decode(next(turn))
            middle = time.perf_counter()
            self._compute([picture])
            both.append(1000 * (time.perf_counter() - started))
            decode.append(1000 * (middle - started))
        return {"lone_ms": statistics.median(both), "lone_decode_ms": statistics.median(decode)}


def _rate(work: object, seconds: float) -> float:
    assert callable(work)
    end = time.perf_counter() + 0.2 * seconds
    while time.perf_counter() < end:
        work()
    done, started = 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        done += work()
    return done / (time.perf_counter() - started)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inprocess")
    parser.add_argument("--pictures", nargs="+", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=8)
    arguments = parser.parse_args()
    settings = load_settings({})
    predictor, info = load_predictor(settings)
    from model.runtime.backend import CompilationState  # noqa: PLC0415  torch reads the environment set just now

    predictor.warm_up()
    while predictor.compilation.state is CompilationState.COMPILING:
        time.sleep(0.1)
    decoders = min(16, len(os.sched_getaffinity(0)))
    limit = Limit(predictor, info, [path.read_bytes() for path in arguments.pictures], decoders)
    seconds = arguments.seconds
    side_by_side, in_turn = limit.side_by_side(seconds), limit.in_turn(seconds)
    found = {
        "rate": max(side_by_side, in_turn),
        "side_by_side": side_by_side,
        "in_turn": in_turn,
        "decode_alone": limit.decode_alone(seconds / 4),
        "forward_alone": limit.forward_alone(seconds / 4),
        **limit.lone(seconds / 2),
    }
    print(json.dumps({name: round(value, 3) for name, value in found.items()} | {"compiled": predictor.compiled}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
