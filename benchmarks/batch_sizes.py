"""Graphs of OpenVINO for each batch size beside one for any size: `python -m benchmarks.batch_sizes`.

Two predictors of the same checkpoint compute the same batches in turn on one CPU thread, in processor time. The ratio
is the median over the rounds of (time with one graph) / (time with a graph for each size): above 1, these are faster.
Where all batches have one size, a graph for any size keeps its kernels; where sizes change, as in a service, it looks
them up again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import checkpoints
from benchmarks.record import RESULTS, Record, table
from model.checkpoint import Checkpoint, load_checkpoint
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.batches import BatchRequest
from model.runtime.openvino import network as openvino_network
from model.runtime.openvino.backend import OpenVino
from model.runtime.predictor import Predictor

_SEQUENCES: Final = {
    "all of 1": [1] * 8,
    "all of 4": [4] * 8,
    "all of 8": [8] * 8,
    "1 to 8, changing": [5, 1, 8, 3, 6, 2, 7, 4],
}


def main() -> None:
    """Measure each model with and without relevance, record it and print the table."""
    arguments = _arguments()
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about={"threads": 1})
    rows = []
    for name in arguments.models:
        checkpoint = load_checkpoint(str(checkpoints.ensure(name)[0]))
        each = _predictor(checkpoint)
        room, openvino_network._FIXED_BYTES = openvino_network._FIXED_BYTES, 0  # type: ignore[misc]
        try:
            one = _predictor(checkpoint)
        finally:
            openvino_network._FIXED_BYTES = room  # type: ignore[misc]
        for explained in (False, True):
            for sequence, sizes in _SEQUENCES.items():
                found = _measure(one, each, sizes, arguments.rounds, explained=explained)
                asked = "relevance" if explained else "no map"
                record.section(name, asked)[sequence] = found
                rows.append((name, asked, sequence, *found.values()))
                record.save()
    print(table(("model", "maps", "batches", "ms, one graph", "ms, one each", "ratio"), rows))


def _predictor(checkpoint: Checkpoint) -> Predictor:
    predictor = Predictor(checkpoint, device="cpu", threads=1, streams=1)
    assert isinstance(predictor._backend, OpenVino)
    predictor._backend.prepare(BatchRequest(relevance=True))
    assert predictor._backend._networks[BatchRequest(relevance=True)] is not None
    return predictor


def _measure(
    one: Predictor, each: Predictor, sizes: Sequence[int], rounds: int, *, explained: bool
) -> dict[str, float]:
    pixels = np.random.default_rng(0).integers(0, 256, (max(sizes), *one.config.image_size, 3), dtype=np.uint8)
    request = RequestedOutputs(5, MapRequest("relevance") if explained else None)

    def spent(predictor: Predictor) -> float:
        started = time.process_time()
        for size in sizes:
            predictor.predict(pixels[:size], request)
        return 1000 * (time.process_time() - started) / sum(sizes)

    for predictor in (one, each):
        spent(predictor)
    pairs = []
    for turn in range(rounds):
        order = (one, each) if turn % 2 else (each, one)
        times = {id(predictor): spent(predictor) for predictor in order}
        pairs.append((times[id(one)], times[id(each)]))
    medians = [round(statistics.median(times), 3) for times in zip(*pairs, strict=True)]
    ratio = round(statistics.median(before / after for before, after in pairs), 3)
    return {"one": medians[0], "each": medians[1], "ratio": ratio}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit32", "vit224"], choices=[*checkpoints.SHAPES])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--record", type=Path, default=RESULTS / "batch-sizes.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
