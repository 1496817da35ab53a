"""Open-loop load: requests leave at the moments of a Poisson process from a seed, whatever the server does.

    python -m benchmarks.openloop PLAN.json

A latency counts from the moment that the plan names, so that a server's stall is charged to every request that it
delays. Connections are kept alive, and opened when all are in use.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from benchmarks.load import Load

_GIVE_UP = 30.0
"""Seconds after the last planned moment."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[int] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes of the answer."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        status = self._parser.get_status_code()
        keep = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        assert self.transport is not None
        if not keep:
            self.transport.close()
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(status)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: closed by the server or the network."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionError("closed before the answer"))

    async def ask(self, request: bytes) -> int:
        """Send; wait for the whole answer; return its status."""
        assert self.transport is not None
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


async def run(plan: dict[str, Any]) -> Load:
    """Follow a plan: `url`, `path`, `headers`, `bodies`, `rate` (per second), `seconds`, and maybe a `seed`."""
    return summary(*await collect(plan), plan["seconds"])


async def collect(plan: dict[str, Any]) -> tuple[list[float], int, int]:
    """As `run`: seconds of each answer 200, how many were refused, how many broke."""
    url = urlsplit(plan["url"])
    requests = [request_bytes(plan, Path(body).read_bytes()) for body in plan["bodies"]]
    loop = asyncio.get_running_loop()
    idle: list[Connection] = []
    latencies: list[float] = []
    refused = broken = 0

    async def one(moment: float, request: bytes) -> None:
        nonlocal refused, broken
        try:
            connection = idle.pop() if idle else None
            if connection is None or connection.transport is None or connection.transport.is_closing():
                _, connection = await loop.create_connection(Connection, url.hostname, url.port)
            status = await connection.ask(request)
        except OSError:
            broken += 1
            return
        idle.append(connection)
        if status == 200:
            latencies.append(time.perf_counter() - moment)
        else:
            refused += 1

    gc.disable()
    gaps = random.Random(plan.get("seed", 0))
    tasks: list[asyncio.Task[None]] = []
    started = time.perf_counter() + 0.1
    at = started
    for request in itertools.cycle(requests):
        at += gaps.expovariate(plan["rate"])
        if at > started + plan["seconds"]:
            break
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        tasks.append(asyncio.create_task(one(at, request)))
    if not tasks:  # the rate is so low that no moment came
        return [], 0, 0
    _, waiting = await asyncio.wait(tasks, timeout=_GIVE_UP)
    for task in waiting:
        task.cancel()
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()  # what is not a broken connection is a fault of this program
    return latencies, refused, broken + len(waiting)


def summary(latencies: list[float], refused: int, broken: int, seconds: float) -> Load:
    """Seconds of each answer to what a record holds."""
    if not latencies:
        return Load(0.0, 0.0, 0.0, 0.0, 0.0, refused, broken)
    milliseconds = sorted(1000 * latency for latency in latencies)
    cuts = statistics.quantiles(milliseconds, n=100, method="inclusive") if len(milliseconds) > 1 else milliseconds * 99
    return Load(len(milliseconds) / seconds, cuts[49], cuts[89], cuts[98], milliseconds[-1], refused, broken)


def request_bytes(plan: dict[str, Any], body: bytes) -> bytes:
    """A whole POST."""
    host = urlsplit(plan["url"]).netloc
    headers = {"Host": host, "Content-Length": str(len(body))} | plan["headers"]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {plan['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


if __name__ == "__main__":
    import uvloop

    print(json.dumps(uvloop.run(run(json.loads(Path(sys.argv[1]).read_text()))).as_json()))
