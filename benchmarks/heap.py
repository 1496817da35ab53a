"""What it costs that glibc gives a pass's memory back: `python -m benchmarks.heap`.

Two processes compute the same batches in torch on one CPU thread, one after `keep_freed_memory` of
`model.runtime.cpu` and one without, in turn. Printed are the thread's milliseconds an image (lower quartile of
the rounds) and the pages that the kernel cleared for each batch.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from unittest import mock

import numpy as np

from benchmarks import checkpoints
from benchmarks.record import RESULTS, Record, table
from model.checkpoint import load_checkpoint
from model.outputs import RequestedOutputs
from model.runtime import torch_cpu
from model.runtime.predictor import Predictor

_BATCHES = (1, 8, 16, 32)


def main() -> None:
    """Measure both, record it and print the table."""
    arguments = _arguments()
    if arguments.child:
        thread = Thread(target=_serve, args=(arguments.model, arguments.child == "keep"))
        thread.start()  # as in a service, where the heap of a thread is another than the first thread's
        thread.join()
        return
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about={"threads": 1, "backend": "torch"})
    rows = []
    for model in arguments.models:
        checkpoints.ensure(model)
        children = {mode: _child(model, mode) for mode in ("as it is", "keep")}
        for batch in _BATCHES:
            rounds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in children}
            for _ in range(arguments.rounds):
                for mode, child in children.items():
                    rounds[mode].append(_ask(child, batch))
            found = {mode: _quartile(measured) for mode, measured in rounds.items()}
            record.section(model)[str(batch)] = found
            before, after = found["as it is"], found["keep"]
            rows.append((model, batch, before[0], after[0], before[0] / after[0], before[1], after[1]))
        for child in children.values():
            assert child.stdin is not None
            child.stdin.close()
            child.wait()
        record.save()
    print(table(("model", "batch", "ms without", "ms with", "ratio", "pages without", "pages with"), rows))


def _serve(name: str, keep: bool) -> None:
    checkpoint = load_checkpoint(str(checkpoints.ensure(name)[0]))
    with nullcontext() if keep else mock.patch.object(torch_cpu, "keep_freed_memory"):
        predictor = Predictor(checkpoint, device="cpu", compile_mode="off", threads=1, streams=1)
    generator = np.random.default_rng(0)
    for line in sys.stdin:
        batch = int(line)
        images = generator.integers(0, 256, (batch, *predictor.config.image_size, 3), dtype=np.uint8)
        for _ in range(2):
            predictor.predict(images, RequestedOutputs(5))
        passes = max(2, 16 // batch)
        pages, started = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.thread_time()
        for _ in range(passes):
            predictor.predict(images, RequestedOutputs(5))
        spent = (time.thread_time() - started) / passes / batch
        print(1000 * spent, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - pages) / passes, flush=True)


def _child(model: str, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.heap", "--model", model, "--child", mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _ask(child: subprocess.Popen[str], batch: int) -> tuple[float, float]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{batch}\n")
    child.stdin.flush()
    milliseconds, pages = map(float, child.stdout.readline().split())
    return milliseconds, pages


def _quartile(measured: list[tuple[float, float]]) -> tuple[float, float]:
    return tuple(round(sorted(values)[len(values) // 4], 3) for values in zip(*measured, strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heap", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit32", "vit224"], choices=[*checkpoints.SHAPES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--record", type=Path, default=RESULTS / "heap.json")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--child", choices=["as it is", "keep"], help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
