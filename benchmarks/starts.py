"""Starts of a checkpoint: `python -m benchmarks.starts [CHECKPOINT...]`. Seconds to ready, and memory.

The first start has an empty cache folder; the others find what it kept. Told are the seconds from the command to the
first answer of `/readyz` with 200, and the memory of all processes then (MiB, proportional set size).
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability import Service
from benchmarks.servers import VITSERVE, resident_mib


def start(checkpoint: str, cache: str) -> tuple[float, float]:
    """Start and stop a service; return the seconds until it was ready, and its MiB then."""
    began = time.monotonic()
    service = Service(VITSERVE, {"VIT_CHECKPOINT": checkpoint, "VIT_CACHE_DIR": cache, "VIT_DRAIN_DELAY": "0"})
    try:
        asyncio.run(service.until_ready())
        return time.monotonic() - began, resident_mib(service.process.pid)
    finally:
        service.stop()


def main() -> int:
    """Measure each checkpoint, record it and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starts", description=__doc__)
    parser.add_argument("checkpoints", nargs="*", default=["bundled"], metavar="CHECKPOINT")
    parser.add_argument("--rounds", type=int, default=5, help="starts after the first one")
    parser.add_argument("--record", type=Path, default=RESULTS / "starts.json")
    arguments = parser.parse_args()
    record = Record(arguments.record, dtype="auto", about={})
    rows = []
    for checkpoint in arguments.checkpoints:
        with tempfile.TemporaryDirectory(prefix="vitserve-cache-") as cache:
            found = [start(checkpoint, cache) for _ in range(1 + arguments.rounds)]
        record.section("starts")[Path(checkpoint).name] = [[round(value, 2) for value in each] for each in found]
        record.save()
        later = [statistics.median(values) for values in zip(*found[1:], strict=True)]
        rows.append((Path(checkpoint).name, *found[0], *later))
    print(table(["checkpoint", "first, s", "MiB", "later (median), s", "MiB"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
