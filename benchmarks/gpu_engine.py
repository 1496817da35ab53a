"""The engine alone: uint8 pictures in host memory go in, the top five classes in host memory come out.

`Ours` is `model.runtime.predictor.Predictor` as the service runs it; `benchmarks.gpu_reference` has what it is compared
with.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from model.checkpoint import Checkpoint
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.backend import CompilationState, CompileMode
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.cuda.ops import CudaOps
from model.runtime.device import choose_device
from model.runtime.predictor import Predictor

TOP_K = 5
WARM_SHARE = 0.25
"""Of a measurement's time, spent before it counts."""
_REPLAYS = 4
"""Graphs that are launched before the device is waited for."""
_MARGIN = 0.02
"""Least distance of two scores that rounding to half the digits does not turn round."""


def random_pictures(checkpoint: Checkpoint, count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """uint8 [count, H, W, C]; noise, as matrix products run faster on zeros."""
    config = checkpoint.config
    shape = (count, *config.image_size, config.in_channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


class Ours:
    """Our predictor, given batches by as many threads as it has streams.

    Args:
        batches: sizes that will be measured; only these (and 1) are compiled; none means a service's own.
        ops: a device in CUDA's place; for tests.

    Attributes:
        seconds: from nothing to ready, and how much of it the compiler and the captures took.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str,
        dtype: str,
        compile_mode: CompileMode,
        batches: Sequence[int] | None,
        ops: DeviceOps | None = None,
    ) -> None:
        started = time.perf_counter()
        self.checkpoint = checkpoint
        self._replay: Callable[[], None] | None = None
        chosen = choose_device(device)
        if ops is None and chosen.type == "cuda":
            ops = CudaOps(chosen)
        if ops is not None:
            self._note_replays(ops)
        with _logged_seconds() as parts:
            self.predictor = Predictor(
                checkpoint,
                device=device,
                dtype=dtype,
                compile_mode=compile_mode,
                backend="torch",
                launch_sizes=sorted({1, *batches}) if batches else None,
                ops=ops,
            )
            self.predictor.warm_up()
            while self.predictor.compilation.state is CompilationState.COMPILING:
                time.sleep(0.05)
        self.seconds = {"ready": round(time.perf_counter() - started, 2), **parts}

    def _note_replays(self, ops: DeviceOps) -> None:
        """Keep in `_replay` what ran the graph of the last batch."""
        capture = ops.capture

        def noting(work: Callable[[], None], stream: Any) -> Callable[[], None]:
            replay = capture(work, stream)

            def noted() -> None:
                self._replay = replay
                replay()

            return noted

        ops.capture = noting  # type: ignore[method-assign]

    @torch.inference_mode()
    def resident_rate(self, batch: int, seconds: float) -> float | None:
        """Images per second of batches that lie on the device, whose answers stay there: graphs, one after another.

        None where the batch is no graph: on a CPU, or uncompiled.
        """
        self._replay = None
        self.predictor.predict(random_pictures(self.checkpoint, batch), RequestedOutputs(TOP_K))
        replay = self._replay
        if replay is None:
            return None

        def work() -> None:
            for _ in range(_REPLAYS):
                replay()
            if torch.cuda.is_available():
                torch.cuda.synchronize(self.predictor.device)

        return rate_of(work, _REPLAYS * batch, seconds)

    def rate(self, batch: int, seconds: float, layer: int | None = None) -> float:
        """Images per second of batches of one size, each image with the attention row of a layer if one is named."""
        request = RequestedOutputs(TOP_K, None if layer is None else MapRequest.row(layer))
        # Several batches in turn, so that none is answered from a cache.
        return self._rate([(random_pictures(self.checkpoint, batch, seed=seed), request) for seed in range(3)], seconds)

    def mixed_rate(self, seconds: float) -> dict[str, float]:
        """Images per second of batches of 1 to the largest size, all alike often, and what share is padding."""
        largest = self.predictor.max_batch
        sizes = np.random.default_rng(0).permutation(np.linspace(1, largest, min(32, largest)).astype(int))
        launched = sum(self.predictor.launch_size(int(size)) for size in sizes)
        request = RequestedOutputs(TOP_K)
        rate = self._rate([(random_pictures(self.checkpoint, int(size)), request) for size in sizes], seconds)
        return {"rate": round(rate, 1), "padding": round(1 - int(sizes.sum()) / launched, 3)}

    def _rate(self, batches: Sequence[tuple[NDArray[np.uint8], RequestedOutputs]], seconds: float) -> float:
        done = [0] * self.predictor.streams
        stop = threading.Event()
        failures: list[BaseException] = []

        def work(stream: int) -> None:
            try:
                for pictures, request in itertools.cycle(batches):
                    if stop.is_set():
                        return
                    self.predictor.predict(pictures, request)
                    done[stream] += len(pictures)
            except RuntimeError as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(stream,)) for stream in range(len(done))]
        for thread in threads:
            thread.start()
        while not all(done) and not failures:
            time.sleep(0.001)
        time.sleep(WARM_SHARE * seconds)
        before, began = sum(done), time.perf_counter()
        time.sleep(seconds)
        after, ended = sum(done), time.perf_counter()
        stop.set()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return (after - before) / (ended - began)

    def peak_memory(self) -> dict[str, float]:
        """The most MiB that torch has had on the device, in tensors and in all; empty on a CPU."""
        if not self.predictor.device.startswith("cuda"):
            return {}
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return dict(zip(("peak_mib_allocated", "peak_mib_reserved"), (peak >> 20 for peak in peaks), strict=True))

    def latency(self, seconds: float) -> dict[str, float]:
        """Milliseconds of one picture alone, from the call to the answer."""
        picture = random_pictures(self.checkpoint, 1)
        return percentiles(lambda: self.predictor.predict(picture, RequestedOutputs(TOP_K)), seconds)

    def top1(self, pictures: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Best class of each picture, as requests get it."""

        def best(part: NDArray[np.uint8]) -> NDArray[np.int64]:
            return np.array([each.indices[0] for each in self.predictor.predict(part, RequestedOutputs(1))])

        found: NDArray[np.int64] = self._in_steps(best, pictures)
        return found

    def agreement(self, pictures: NDArray[np.uint8]) -> dict[str, float]:
        """Compare logits and best classes with those of float32 on the CPU, uncompiled.

        Returns:
            The largest difference of a logit in standard deviations of all, the share of pictures whose best class is
            the same, and the same of those whose two best scores are `_MARGIN` or more apart, with their number.
        """
        checkpoint = self.checkpoint
        cores = len(os.sched_getaffinity(0))  # beside a GPU ours has left torch with one thread
        exact = Predictor(checkpoint, device="cpu", dtype="float32", compile_mode="off", backend="torch", threads=cores)
        wanted = _in_steps(exact.logits, pictures, exact.max_batch)
        found = self._in_steps(self.predictor.logits, pictures)
        equal = self.top1(pictures) == wanted.argmax(axis=1)
        scores = np.sort(np.exp(wanted - wanted.max(axis=1, keepdims=True)), axis=1)
        scores /= scores.sum(axis=1, keepdims=True)
        sure = scores[:, -1] - scores[:, -2] >= _MARGIN
        return {
            "pictures": len(pictures),
            "logit_difference": round(float(np.abs(found - wanted).max() / wanted.std()), 4),
            "equal_top1": round(float(equal.mean()), 4),
            "sure_pictures": int(sure.sum()),
            "equal_top1_of_sure": round(float(equal[sure].mean()), 4) if sure.any() else 0.0,
        }

    def _in_steps(self, compute: Callable[[NDArray[np.uint8]], NDArray[Any]], pictures: NDArray[np.uint8]) -> Any:
        return _in_steps(compute, pictures, self.predictor.max_batch)


def _in_steps(compute: Callable[[NDArray[np.uint8]], NDArray[Any]], pictures: NDArray[np.uint8], step: int) -> Any:
    return np.concatenate([compute(pictures[at : at + step]) for at in range(0, len(pictures), step)])


@contextmanager
def _logged_seconds() -> Iterator[dict[str, float]]:
    """Gather what the runtime logs of its start: `compiled` and `captured`, in seconds."""
    parts: dict[str, float] = {}

    class Reader(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.endswith("in %.0f s") and isinstance(record.args, tuple):
                parts[str(record.args[0])] = round(float(str(record.args[-1])), 2)

    logger, reader = logging.getLogger("model.runtime"), Reader()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(reader)
    try:
        yield parts
    finally:
        logger.removeHandler(reader)
        logger.setLevel(level)


def give_memory_back() -> None:
    """Free what nobody holds any more: servers that are started later need it, and the compiler a clean table."""
    gc.collect()  # a predictor and its launcher are a cycle
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def rate_of(work: Callable[[], None], images: int, seconds: float) -> float:
    """Images per second of calls that do so many images each."""
    for _ in range(3):  # compiles, and records CUDA graphs
        work()
    end = time.perf_counter() + WARM_SHARE * seconds
    while time.perf_counter() < end:
        work()
    done, began = 0, time.perf_counter()
    while (now := time.perf_counter()) < began + seconds:
        work()
        done += images
    return done / (now - began)


def percentiles(work: Callable[[], Any], seconds: float) -> dict[str, float]:
    """Milliseconds of a call: median, 99th percentile, and how many calls they are of."""
    for _ in range(5):
        work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 10:
        began = time.perf_counter()
        work()
        taken.append(1000 * (time.perf_counter() - began))
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return {"p50_ms": round(cuts[49], 3), "p99_ms": round(cuts[98], 3), "calls": len(taken)}
