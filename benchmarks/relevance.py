"""What relevance, an embedding or a set adds in the predictor alone: `python -m benchmarks.relevance --output sets`.

Batches with and without it take turns on one CPU thread, in processor time. The ratio is the median over the rounds of
(time without) / (time with), and 1 would be free.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks import checkpoints
from benchmarks.record import RESULTS, Record, table
from model.checkpoint import load_checkpoint
from model.outputs import EmbeddingRequest, MapRequest, RequestedOutputs
from model.runtime.backend import BatchRequest, CompileMode
from model.runtime.openvino.backend import OpenVino
from model.runtime.predictor import Predictor

_BATCHES = (1, 8, 16)
_OUTPUTS: Final = {
    "relevance": RequestedOutputs(5, MapRequest("relevance")),
    "embedding": RequestedOutputs(5, embedding=EmbeddingRequest()),
    "embedding-mean": RequestedOutputs(5, embedding=EmbeddingRequest("mean")),
    "sets": RequestedOutputs(5, label_set=True),
}
_BACKENDS: Final[tuple[tuple[str, CompileMode], ...]] = (("openvino", "auto"), ("torch", "off"))
_COVERAGE = 0.9
_SECONDS = 0.06
"""Of passes in a round, at least one."""


def main() -> None:
    """Measure each model and backend, record it and print the table."""
    arguments = _arguments()
    requested = _OUTPUTS[arguments.output]
    record = Record(
        arguments.record or RESULTS / f"{arguments.output}-predictor.json",
        dtype="auto (bfloat16 where native)",
        about={"threads": 1},
    )
    rows = []
    for name in ("bundled",) if requested.label_set else arguments.models:  # the bundled model is calibrated
        checkpoint = load_checkpoint(name if requested.label_set else str(checkpoints.ensure(name)[0]))
        for backend, mode in _BACKENDS:
            predictor = Predictor(checkpoint, device="cpu", compile_mode=mode, threads=1, streams=1)
            if requested.label_set:
                predictor.set_coverage(_COVERAGE)
            if isinstance(predictor._backend, OpenVino) and BatchRequest.of([requested], checkpoint.config).relevance:
                predictor._backend.prepare()
            for batch in _BATCHES:
                found = _measure(predictor, requested, batch, arguments.rounds)
                record.section(name, backend)[str(batch)] = found
                rows.append((name, backend, batch, *found.values()))
                record.save()
    print(table(("model", "backend", "batch", "ms without", "ms with", "ratio"), rows))


def _measure(predictor: Predictor, requested: RequestedOutputs, batch: int, rounds: int) -> dict[str, float]:
    images = np.random.default_rng(0).integers(0, 256, (batch, *predictor.config.image_size, 3), dtype=np.uint8)

    def spent(passes: int, *, added: bool) -> float:
        started = time.process_time()
        for _ in range(passes):
            predictor.predict(images, requested if added else RequestedOutputs(5))
        return 1000 * (time.process_time() - started) / passes / batch

    for added in (False, True):
        spent(3, added=added)
    passes = max(1, round(_SECONDS / (spent(2, added=False) * batch / 1000)))
    pairs = []
    for turn in range(rounds):
        order = (False, True) if turn % 2 else (True, False)
        pair = {added: spent(passes, added=added) for added in order}
        pairs.append((pair[False], pair[True]))
    without, with_it = (round(statistics.median(times), 3) for times in zip(*pairs, strict=True))
    return {"without": without, "with": with_it, "ratio": round(statistics.median(a / b for a, b in pairs), 3)}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.relevance", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit32", "vit224"], choices=[*checkpoints.SHAPES])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--output", choices=_OUTPUTS, default="relevance", help="what half of the batches ask for")
    parser.add_argument("--record", type=Path, help="default: `OUTPUT-predictor.json` beside the other records")
    return parser.parse_args()


if __name__ == "__main__":
    main()
