"""Load from several processes, closed or open loop; needs no wrk.

    python -m benchmarks.loadgen < PLAN.json        (one process of it; `load` starts them)

Closed: each connection sends its next request when it has its answer. Open: see `benchmarks.openloop`; the rate is
shared out, each process with moments of its own. All begin at the same time of the wall clock.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.checkpoints import REPOSITORY
from benchmarks.load import Load, Protocol
from benchmarks.openloop import Connection, collect, request_bytes, summary

_HEAD_START = 2.0
"""Seconds that several processes have to start, so that they begin together."""


@dataclass(frozen=True)
class Plan:
    """What to send where.

    Attributes:
        connections: requests under way, of a closed loop; None for an open one.
        rate: requests per second, of an open loop.
    """

    url: str
    protocol: Protocol
    pictures: Sequence[bytes]
    seconds: float
    connections: int | None = None
    rate: float | None = None


def load(plan: Plan, *, processes: int) -> Load:
    """Send it, from as many processes (fewer where there are fewer connections).

    Raises:
        subprocess.CalledProcessError: a process failed; its stderr is shown.
    """
    if plan.connections is not None:
        processes = min(processes, plan.connections)
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as name:
        bodies = []
        for index, picture in enumerate(plan.pictures):
            body = Path(name) / f"{index:03}.body"
            body.write_bytes(plan.protocol.wrap(picture))
            bodies.append(str(body))
        common = {
            "url": plan.url,
            "path": plan.protocol.path,
            "headers": plan.protocol.headers,
            "bodies": bodies,
            "seconds": plan.seconds,
            "begin": time.time() + (_HEAD_START if processes > 1 else 0),
        }
        started = []
        for index in range(processes):
            share: dict[str, Any] = {"seed": index, "result": str(Path(name) / f"{index}.json")}
            if plan.connections is not None:
                share["connections"] = plan.connections // processes + (index < plan.connections % processes)
            else:
                assert plan.rate is not None
                share["rate"] = plan.rate / processes
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
            }
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.loadgen"],
                stdin=subprocess.PIPE,
                env=environment,
                cwd=REPOSITORY,
                text=True,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(common | share))
            process.stdin.close()
            started.append(process)
        latencies: list[float] = []
        refused = broken = 0
        failed = 0
        for index, process in enumerate(started):
            if process.wait(timeout=plan.seconds + 120):
                failed = process.returncode
                continue
            found = json.loads((Path(name) / f"{index}.json").read_text())
            latencies += found["latencies"]
            refused += found["refused"]
            broken += found["broken"]
        if failed:
            raise subprocess.CalledProcessError(failed, "benchmarks.loadgen")
    return summary(latencies, refused, broken, plan.seconds)


async def closed(plan: dict[str, Any]) -> tuple[list[float], int, int]:
    """One process's connections: seconds of each answer 200 in time, how many were refused, how many broke."""
    url = urlsplit(plan["url"])
    requests = itertools.cycle([request_bytes(plan, Path(body).read_bytes()) for body in plan["bodies"]])
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    refused = broken = 0
    end = time.perf_counter() + plan["seconds"]

    async def one() -> None:
        nonlocal refused, broken
        connection: Connection | None = None
        while (sent := time.perf_counter()) < end:
            try:
                if connection is None or connection.transport is None or connection.transport.is_closing():
                    _, connection = await loop.create_connection(Connection, url.hostname, url.port)
                status = await connection.ask(next(requests))
            except OSError:
                broken += 1
                connection = None
                await asyncio.sleep(0.01)
                continue
            answered = time.perf_counter()
            if status != 200:
                refused += 1
            elif answered < end:
                latencies.append(answered - sent)

    await asyncio.gather(*(one() for _ in range(plan["connections"])))
    return latencies, refused, broken


async def _follow(plan: dict[str, Any]) -> dict[str, Any]:
    gc.disable()
    await asyncio.sleep(max(0.0, plan["begin"] - time.time()))
    latencies, refused, broken = await (closed(plan) if "connections" in plan else collect(plan))
    return {"latencies": latencies, "refused": refused, "broken": broken}


if __name__ == "__main__":
    import uvloop

    # Into a file: longer than a pipe's buffer, it came out of one cut short now and then.
    task = json.load(sys.stdin)
    Path(task["result"]).write_text(json.dumps(uvloop.run(_follow(task))))
