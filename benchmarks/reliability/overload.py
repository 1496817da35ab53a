"""Many times more requests than can be answered: `python -m benchmarks.reliability.overload`.

The service has one core and the load generator another, so that neither takes time from the other. Each round measures
the peak (a closed loop of 32 connections), an open loop at a multiple of it, and closed loops of 256 and 512
connections. A measurement begins when the load has settled: a queue that fills takes work whose answers come later,
and five hundred callers who connect at once wait for each other (`unsettled`).
Told are the medians over the rounds: the share of the peak that is still answered, how late accepted
requests are answered, and how soon the others are refused. `generator_busy` is the generator's share of its core: near
1, the figures are the generator's and not the service's.

Before the rounds, a service whose only place is taken tells what a refusal costs, in microseconds of processor time:
the one figure here that hardly changes when other work wants the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.checkpoints import REPOSITORY
from benchmarks.record import RESULTS, Record, medians, table
from benchmarks.reliability.flood import Outcomes, post
from benchmarks.reliability.service_process import ServiceProcess

_FULL = {"VIT_QUEUE_SIZE": "1", "VIT_MAX_BATCH": "2", "VIT_MAX_DELAY_MS": "10000", "VIT_REQUEST_TIMEOUT": "60"}
"""One picture waits for another in its batch and takes the only place for ten seconds."""

_REFUSED = 1000
"""Connections that are refused: each only once a second, as nothing is answered meanwhile."""


class Load:
    """Runs the generator on a core of its own."""

    def __init__(self, folder: Path, port: int, files: list[Path], core: int, settle: float = 0.0) -> None:
        self._plan = folder / "plan.json"
        self._about = {"port": port, "files": [str(file) for file in files], "settle": settle}
        self._core = core

    def __call__(self, **what: float) -> Outcomes:
        """Measure once: `seconds`, and `rate` or `connections`."""
        self._plan.write_text(json.dumps(self._about | what))
        command = [
            "taskset",
            "-c",
            str(self._core),
            sys.executable,
            "-m",
            "benchmarks.reliability.flood",
            str(self._plan),
        ]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True)
        return Outcomes(**json.loads(done.stdout))


def refusal_cost(files: list[Path], settings: Mapping[str, str], seconds: float) -> dict[str, float]:
    """Return the processor time that refusing a picture takes, and how many were refused a second.

    Raises:
        ValueError: a request was answered otherwise.
    """
    cores = sorted(os.sched_getaffinity(0))
    with _service({**settings, **_FULL}, cores[0]) as (service, folder):
        with socket.create_connection(("127.0.0.1", service.port)) as holder:
            holder.sendall(post(files[0].read_bytes()))
            time.sleep(0.5)  # until it has its place
            before = service.processor_seconds()
            outcomes = Load(folder, service.port, files, cores[-1])(connections=_REFUSED, seconds=seconds)
            used = service.processor_seconds() - before
        refused = len(outcomes.refused)
        if outcomes.answered or outcomes.other or not refused:
            raise ValueError(f"{len(outcomes.answered)} answered, {outcomes.other} neither, {refused} refused")
        return {"microseconds": 1e6 * used / refused, "per_second": refused / seconds}


@contextmanager
def _service(settings: Mapping[str, str], core: int) -> Iterator[tuple[ServiceProcess, Path]]:
    with tempfile.TemporaryDirectory(prefix="vitserve-overload-") as folder:
        service = ServiceProcess(Path(folder) / "log", {"VIT_DRAIN_TIMEOUT": "3", **settings}, core)
        try:
            service.wait_until_ready()
            yield service, Path(folder)
        finally:
            service.stop()


def one_round(load: Load, times: float, seconds: float) -> dict[str, float]:
    """Return the figures of one round."""
    peak = _rate(load(connections=32, seconds=seconds))
    flood = load(rate=times * peak, seconds=seconds)
    few = _rate(load(connections=256, seconds=seconds))
    many = load(connections=512, seconds=seconds)
    return {
        "peak": peak,
        "goodput": _rate(flood),
        "share": _rate(flood) / peak,
        **_latencies("accepted", flood.answered),
        **_latencies("refused", flood.refused),
        **_latencies("unsettled", flood.unsettled),
        "refused": len(flood.refused) / seconds,
        "other": float(flood.other),
        "lost": float(flood.lost),
        "connected": float(flood.connected),
        "generator_busy": flood.busy,
        **_latencies("generator_late", flood.late),
        "connections_256": few,
        "connections_512": _rate(many),
        "512_of_256": _rate(many) / few,
        "512_refused": len(many.refused) / seconds,
        "512_generator_busy": many.busy,
    }


def _rate(outcomes: Outcomes) -> float:
    return outcomes.in_time / outcomes.seconds


def _latencies(name: str, seconds: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [float("nan")] * 99
    return {f"{name}_p{percent}_ms": 1000 * cuts[percent - 1] for percent in (50, 95, 99)}


def measure(arguments: argparse.Namespace, files: list[Path], settings: Mapping[str, str]) -> list[dict[str, float]]:
    """Measure all rounds of one service."""
    cores = sorted(os.sched_getaffinity(0))
    rounds: list[dict[str, float]] = []
    with _service(settings, cores[0]) as (service, folder):
        load = Load(folder, service.port, files, cores[-1], arguments.settle)
        load(connections=32, seconds=arguments.seconds)
        for _ in range(arguments.rounds):
            rounds.append(one_round(load, arguments.times, arguments.seconds))
            print({name: round(value, 2) for name, value in rounds[-1].items()}, file=sys.stderr)
    return rounds


def main() -> int:
    """Measure, print the table, save the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.overload", description=__doc__)
    parser.add_argument("--times", type=float, default=5, help="of the peak that are sent")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--settle", type=float, default=8, help="seconds before each measurement; fills the queue")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", default="bundled")
    parser.add_argument("--setting", action="append", default=[], metavar="VIT_NAME=VALUE", help="of the service")
    parser.add_argument("--record", type=Path, default=RESULTS / "overload.json")
    arguments = parser.parse_args()
    files, origin = pictures.ensure()
    settings = dict(pair.split("=", 1) for pair in arguments.setting)
    about: dict[str, Any] = {"pictures": origin, "model": arguments.checkpoint, "settings": settings}
    arguments.record.unlink(missing_ok=True)
    record = Record(arguments.record, dtype="auto", about=about)
    settings = {"VIT_DRAIN_DELAY": "0", "VIT_CHECKPOINT": arguments.checkpoint} | settings
    record.data["refusal"] = refusal_cost(files, settings, min(8.0, arguments.seconds))
    record.save()
    record.data["rounds"] = measure(arguments, files, settings)
    record.data["medians"] = medians(record.data["rounds"])
    record.save()
    print(
        table(["", "median"], [("refusal_us", record.data["refusal"]["microseconds"]), *record.data["medians"].items()])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
