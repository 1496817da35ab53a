"""Memory against rate for other numbers of OpenVINO's graphs: `python -m benchmarks.graph_sizes`.

Each choice of batch sizes is a process of its own, which starts from kept graphs and holds no torch. Printed are its
resident memory once it is warm and after its batches, the seconds until it is warm, and images a second of two threads
whose batches have 1 to 8 images at random, or 8 each.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import checkpoints
from benchmarks.record import RESULTS, Record, table

_CHOICES: Final[dict[str, tuple[int, ...] | None]] = {
    "1: any size": None,
    "2: 1, 8": (1, 8),
    "3: 1, 4, 8": (1, 4, 8),
    "4: 1, 2, 4, 8": (1, 2, 4, 8),
    "6: 1, 2, 3, 4, 6, 8": (1, 2, 3, 4, 6, 8),
}


def measure(checkpoint: str, folder: str, sizes: tuple[int, ...] | None, seconds: float) -> dict[str, Any]:
    """Return what one choice of sizes costs and brings, in this process."""
    from model.outputs import RequestedOutputs  # noqa: PLC0415  what is imported before would count as memory
    from model.runtime.openvino import network  # noqa: PLC0415
    from service.engine.loading import load_predictor  # noqa: PLC0415
    from service.settings import load_settings  # noqa: PLC0415

    if sizes is None:
        network._FIXED_BYTES = 0  # type: ignore[misc]
    else:
        network._SIZES = sizes  # type: ignore[assignment,misc]
    started = time.monotonic()
    settings = load_settings({"checkpoint": checkpoint, "cache_dir": folder, "device": "cpu"})
    predictor, _ = load_predictor(settings)
    predictor.warm_up()
    for thread in threading.enumerate():
        if thread.name == "openvino-keep":
            thread.join()
    found: dict[str, Any] = {"seconds": round(time.monotonic() - started, 2), "warm MiB": _resident()}
    pixels = np.random.default_rng(0).integers(0, 256, (8, *predictor.config.image_size, 3), dtype=np.uint8)

    def rate(batches: Sequence[int]) -> float:
        done = [0, 0]
        end = time.monotonic() + seconds

        def run(place: int) -> None:
            turn = place
            while time.monotonic() < end:
                count = batches[turn % len(batches)]
                predictor.predict(pixels[:count], RequestedOutputs(5))
                done[place] += count
                turn += 1

        threads = [threading.Thread(target=run, args=(place,)) for place in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return round(sum(done) / seconds, 1)

    drawn = np.random.default_rng(1).integers(1, 9, 64).tolist()
    rate([8])
    found |= {"images/s, 1 to 8": rate(drawn), "images/s, 8": rate([8]), "used MiB": _resident()}
    return found | {"torch": "torch" in sys.modules}


def _resident() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS"].split()[0]) // 1024


def main() -> None:
    """Measure each choice for each model, record it and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.graph_sizes", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["vit32", "vit224"], choices=[*checkpoints.SHAPES])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--record", type=Path, default=RESULTS / "graph-sizes.json")
    arguments = parser.parse_args()
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about={"threads": 2, "streams": 2})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            checkpoint = str(checkpoints.ensure(name)[0])
            _in_child(checkpoint, folder, None, 0.1)  # which makes the graph
            for choice, sizes in _CHOICES.items():
                found = _in_child(checkpoint, folder, sizes, arguments.seconds)
                record.section(name)[choice] = found
                record.save()
                rows.append((name, choice, *found.values()))
    print(table(("model", "graphs", "s", "warm MiB", "img/s 1-8", "img/s 8", "used MiB", "torch"), rows))


def _in_child(*arguments: Any) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


if __name__ == "__main__":
    main()
