"""Larger models beside what OpenVINO does alone: `python -m benchmarks.larger`.

For ViT-S/16, B/32, B/16 and L/16 with random weights, vitserve with two streams and with one: answered requests a
second, p50, memory and seconds until ready. Beside it stands `benchmark_app`, OpenVINO's own tool, which runs the same
graph with the same streams on random pictures in batches of 8, and neither decodes nor answers. With two streams the
graph is made at the start, with one it is read from where it was kept. Each figure is saved as soon as it is made; the
same command goes on where the record stops.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from benchmarks import checkpoints, memory, pictures
from benchmarks.load import loader
from benchmarks.peers import graph
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import OURS, VITSERVE, Config, running

_BATCH: Final = 8
_CONNECTIONS: Final = 16
"""So that no answer of ViT-L takes as long as the service lets a request wait."""

_PICTURES: Final = 100
"""Answered in a measurement, at least about."""

_APP: Final = (
    "import sys; sys.modules['openvino_telemetry'] = None; from openvino.tools.benchmark.main import main; main()"
)


def main() -> None:
    """Measure what the record lacks, then print the table."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    about = {
        "pictures": origin,
        "connections": _CONNECTIONS,
        "weights": "random, seed 0",
        "batch of benchmark_app": _BATCH,
    }
    record = Record(arguments.record, dtype="bfloat16", about=about)
    for name in arguments.models:
        folder, _ = checkpoints.ensure(name)
        graph.ensure(folder)
        with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
            for streams in (2, 1):
                found = record.section("models", name, f"streams {streams}")
                if "benchmark_app" not in found:
                    found["benchmark_app"] = _alone(folder, streams, arguments.seconds)
                    record.save()
                if "vitserve" not in found:
                    config = {"VIT_CACHE_DIR": cache}
                    # So long that the batches under way at the end count for little.
                    seconds = max(arguments.seconds, _PICTURES / found["benchmark_app"])
                    found["vitserve"] = _served(folder, files, config, seconds)
                    record.save()
                print(name, streams, found, flush=True)
    print(report(record.data))


def report(data: dict[str, Any]) -> str:
    """The table of a record, in Markdown."""
    header = ("", "streams", "answered/s", "p50 ms", "benchmark_app/s", "of the best", "MiB ready", "loaded", "ready s")
    rows = []
    for name, model in data.get("models", {}).items():
        alone = {streams: found["benchmark_app"] for streams, found in model.items()}
        for streams, found in model.items():
            ours = found["vitserve"]
            share = f"{ours['rate'] / max(alone.values()):.2f}"
            memories = round(ours["mib_ready"]), round(ours["mib_loaded"])
            label = streams.removeprefix("streams ")
            rows.append(
                (name, label, ours["rate"], ours["p50"], alone[streams], share, *memories, ours["ready_seconds"])
            )
    return table(header, rows)


def _alone(folder: Path, streams: int, seconds: float) -> float:
    """Pictures a second that `benchmark_app` reports for the graph."""
    size = checkpoints.VIT224.size
    command = [sys.executable, "-c", _APP, "-m", str(graph.ensure(folder)), "-d", "CPU", "-infer_precision", "bf16"]
    command += ["-nstreams", str(streams), "-nthreads", "2", "-t", str(round(seconds)), "-hint", "none"]
    command += ["-shape", f"[{_BATCH},{size},{size},3]", "-layout", "[NHWC]"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"Throughput:\s+([\d.]+) FPS", done.stdout)
    if found is None:
        raise SystemExit(f"benchmark_app gave no throughput:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(found[1])


def _served(folder: Path, files: list[Path], config: Config, seconds: float) -> dict[str, float]:
    first = files[0].read_bytes()
    with running(VITSERVE, folder, config, picture=first) as server, loader(files, OURS) as load:
        ready = _mebibytes(server.pids())
        load.closed(server.url, connections=_CONNECTIONS, seconds=2)
        found = load.closed(server.url, connections=_CONNECTIONS, seconds=seconds)
        loaded = _mebibytes(server.pids())
        return found.as_json() | {
            "mib_ready": ready,
            "mib_loaded": loaded,
            "ready_seconds": round(server.answer_seconds, 2),
        }


def _mebibytes(pids: list[int]) -> float:
    total: float = sum(process["pss_mib"] for process in memory.processes(pids))
    return round(total, 1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.larger", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[*checkpoints.LARGER], choices=[*checkpoints.LARGER])
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--record", type=Path, default=RESULTS / "larger.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
