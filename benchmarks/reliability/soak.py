"""A service under mixed traffic for long: `python -m benchmarks.reliability.soak`, or `make soak`. Does anything grow?

The traffic is 70 % of what the service can answer: 20 % of the callers leave, 5 % send damaged pictures, maps and
batches are mixed in. Memory, file descriptors, threads and tasks of all processes are read every two seconds. After the
first 5,000 requests the rest is cut into ten pieces; the slope is fitted to the pieces' means, which are nearly
independent of each other, so that the usual confidence interval of a fitted line holds (batch means).

Whether memory is flat: `make soak REQUESTS=50000` keeps no pictures and fits the line over requests 5,000 to 50,000.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks import pictures
from benchmarks.memory import anonymous, whole
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability.http_caller import HttpCaller
from benchmarks.reliability.service_process import ServiceProcess
from benchmarks.reliability.traffic import Outcome, Traffic, capacity, learn

_PATIENCE = 12.0
_EVERY = 2.0
_PIECES = 10
_T_QUANTILE = 2.306
"""Of Student's t, 97.5 %, for ten pieces less the two parameters of a line."""
_SETTLED = 5000
"""Requests after which allocators and caches are warm."""

Sample = dict[str, float]


async def soak(arguments: argparse.Namespace, files: list[bytes]) -> dict[str, Any]:
    """Return what became of the requests, and the samples."""
    settings = dict(pair.split("=", 1) for pair in arguments.setting)
    with tempfile.TemporaryDirectory(prefix="vitserve-soak-") as folder:
        service = ServiceProcess(Path(folder) / "log", {"VIT_DRAIN_DELAY": "0", **settings})
        try:
            await asyncio.to_thread(service.wait_until_ready)
            caller = HttpCaller("127.0.0.1", service.port, patience=_PATIENCE)
            known = await learn(caller, files)
            peak = await capacity(caller, known, 10)
            rate = arguments.rate or arguments.load * peak
            seconds = arguments.requests / rate if arguments.requests else 60 * arguments.minutes
            print(f"{peak:.0f} requests a second at most; {rate:.0f} are sent", file=sys.stderr)
            traffic = Traffic(caller, known, seed=arguments.seed)
            sending = asyncio.create_task(traffic.run(rate, seconds))
            samples: list[Sample] = []
            missed = 0
            began = time.monotonic()
            while not sending.done():
                sample = {
                    "seconds": round(time.monotonic() - began, 1),
                    "requests": float(sum(traffic.counts.values())),
                }
                try:
                    samples.append(sample | await asyncio.to_thread(_look, service))
                except httpx.HTTPError:
                    missed += 1
                await asyncio.sleep(_EVERY)
            await sending
        finally:
            exit_code = service.stop()
        if traffic.faults:
            print("\n".join(traffic.notes[:20]), service.log[-4000:], sep="\n", file=sys.stderr)
    latencies = sorted(traffic.latencies)
    return {
        "settings": settings,
        "capacity": round(peak, 1),
        "rate": round(rate, 1),
        "outcomes": {
            str(outcome): total
            for outcome in Outcome
            if (total := sum(number for (_, found), number in traffic.counts.items() if found is outcome))
        },
        "faults": traffic.faults,
        "p50_ms": round(1000 * statistics.median(latencies), 1),
        "p99_ms": round(1000 * latencies[int(0.99 * len(latencies))], 1),
        "exit_code": exit_code,
        "missed_samples": missed,
        "samples": samples,
    }


def _look(service: ServiceProcess) -> Sample:
    pids = service.pids()
    text = httpx.get(f"{service.url}/metrics", timeout=_PATIENCE).text
    tasks = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("vit_event_loop_tasks ")]
    return {
        "rss_mib": whole(pids),
        "anonymous_mib": sum(anonymous(pid) for pid in pids),
        "fds": float(sum(_entries(pid, "fd") for pid in pids)),
        "threads": float(sum(_entries(pid, "task") for pid in pids)),
        "tasks": sum(tasks),
    }


def _entries(pid: int, folder: str) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/{folder}").iterdir())


def slope(samples: Sequence[Sample], name: str) -> tuple[float, float]:
    """Return the growth per 1,000 requests after the first 5,000, and half of its 95 % confidence interval.

    Raises:
        ValueError: there are too few samples after the first 5,000 requests.
    """
    settled = [sample for sample in samples if sample["requests"] >= _SETTLED]
    size = len(settled) // _PIECES
    if size < 1:
        raise ValueError(f"only {len(settled)} samples after {_SETTLED} requests")
    pieces = [settled[index * size : (index + 1) * size] for index in range(_PIECES)]
    x = [statistics.fmean(sample["requests"] / 1000 for sample in piece) for piece in pieces]
    y = [statistics.fmean(sample[name] for sample in piece) for piece in pieces]
    line = statistics.linear_regression(x, y)
    residuals = [value - line.slope * moment - line.intercept for moment, value in zip(x, y, strict=True)]
    variance = sum(value**2 for value in residuals) / (_PIECES - 2)
    spread = sum((moment - statistics.fmean(x)) ** 2 for moment in x)
    return line.slope, _T_QUANTILE * (variance / spread) ** 0.5


def main() -> int:
    """Measure, print the table, save the record."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    arguments.record.unlink(missing_ok=True)
    record = Record(arguments.record, dtype="auto", about={"pictures": origin, "model": "bundled"})
    found = asyncio.run(soak(arguments, [file.read_bytes() for file in files]))
    record.data |= found
    record.save()
    print(f"{sum(found['outcomes'].values())} requests at {found['rate']} a second; p99 {found['p99_ms']} ms\n")
    print(table(["outcome", "requests"], found["outcomes"].items()))
    rows = []
    units = {"rss_mib": "MiB resident", "anonymous_mib": "of it no file's", "fds": "file descriptors"}
    for name, unit in (units | {"threads": "threads", "tasks": "tasks"}).items():
        growth, half = slope(found["samples"], name)
        record.section("slopes")[name] = {"per_1000_requests": growth, "half_interval": half}
        last = found["samples"][-1][name]
        rows.append([unit, last, f"{growth:+.4f} ± {half:.4f}", "no" if growth - half <= 0 else "yes"])
    record.save()
    print("\n" + table(["", "at the end", "growth per 1,000 requests (95 %)", "grows"], rows))
    return int(bool(found["faults"] or found["exit_code"]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--requests", type=int, help="instead of minutes: how many are sent")
    parser.add_argument("--rate", type=float, help="instead of a share: requests a second")
    parser.add_argument("--load", type=float, default=0.7, help="share of the capacity that is sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", action="append", default=[], metavar="VIT_NAME=VALUE", help="of the service")
    parser.add_argument("--record", type=Path, default=RESULTS / "soak.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
