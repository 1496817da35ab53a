"""Load on a server: closed and open loops.

Closed: each connection sends its next request when it has its answer. Open: requests leave at the moments of a Poisson
process from a seed, whatever the server does; a latency counts from that moment, so that a stall is charged to every
request that it delays. A `Protocol` says how a server wants its picture; the load is the same for all.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httptools
import uvloop

_GIVE_UP = 30.0
"""Seconds after the last planned moment."""
_HEAD_START = 2.0
"""Seconds that several processes have to start, so that they begin together."""


@dataclass(frozen=True)
class Protocol:
    """How one server takes a picture and tells its best class.

    Attributes:
        path: of the POST.
        headers: of the POST, without Host and Content-Length.
        wrap: JPEG to body.
        top1: answer's body to the index of the best class.
    """

    path: str
    headers: dict[str, str]
    wrap: Callable[[bytes], bytes]
    top1: Callable[[bytes], int]


@dataclass(frozen=True)
class Load:
    """What the clients saw.

    Attributes:
        rate: requests answered 200, per second.
        p50, p90, p99, max: milliseconds until the answer.
        refused: answers with another status.
        broken: connections that failed, and requests without an answer.
    """

    rate: float
    p50: float
    p90: float
    p99: float
    max: float
    refused: int
    broken: int

    @classmethod
    def of(cls, latencies: Sequence[float], refused: int, broken: int, seconds: float) -> Load:
        """From the seconds of each answer 200."""
        if not latencies:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0, refused, broken)
        ms = sorted(1000 * latency for latency in latencies)
        cuts = statistics.quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
        return cls(len(ms) / seconds, cuts[49], cuts[89], cuts[98], ms[-1], refused, broken)

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


class Loader:
    """Sends one picture set to a server.

    Args:
        processes: that send.
    """

    def __init__(self, pictures: Sequence[Path], protocol: Protocol, processes: int = 1) -> None:
        self._protocol = protocol
        self._bodies = [protocol.wrap(picture.read_bytes()) for picture in pictures]
        self._processes = processes

    def closed(self, url: str, *, connections: int, seconds: float) -> Load:
        """As many requests under way as connections."""
        return self._send(url, seconds, connections=connections)

    def open(self, url: str, *, rate: float, seconds: float) -> Load:
        """Requests at moments that do not depend on the answers."""
        return self._send(url, seconds, rate=rate)

    def _send(self, url: str, seconds: float, *, connections: int = 0, rate: float = 0.0) -> Load:
        """Send from several processes, that begin together."""
        count = min(self._processes, connections) if connections else self._processes
        begin = time.time() + (_HEAD_START if count > 1 else 0)
        host, _, port = url.removeprefix("http://").partition(":")
        requests = [_request(self._protocol, host, body) for body in self._bodies]
        shares = [connections // count + (index < connections % count) for index in range(count)]
        plans = [
            _Plan((host, int(port)), requests, seconds, begin, seed, share, rate / count)
            for seed, share in enumerate(shares)
        ]
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(_follow, plans, timeout=seconds + 120))
        latencies = list(itertools.chain.from_iterable(each[0] for each in found))
        return Load.of(latencies, sum(each[1] for each in found), sum(each[2] for each in found), seconds)


class Connection(asyncio.Protocol):
    """One request at a time; httptools calls `on_message_complete`."""

    def __init__(self) -> None:
        self.transport: Any = None  # uvloop's is no asyncio.Transport by inheritance
        self._answer: asyncio.Future[int] | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: connected."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes of the answer."""
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        """httptools: the answer is whole."""
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.transport.close()
        self._parser = httptools.HttpResponseParser(self)
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(status)

    def connection_lost(self, error: Exception | None) -> None:
        """asyncio: closed by the server or the network."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed before the answer"))

    async def ask(self, request: bytes) -> int:
        """Send; wait for the whole answer; return its status."""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self._answer


class _Plan(NamedTuple):
    """What a process sends: in a closed loop over its connections, or at a rate where it has none."""

    address: tuple[str, int]
    requests: list[bytes]
    seconds: float
    begin: float
    seed: int
    connections: int
    rate: float


class _Sender:
    """One process's requests and what became of them: seconds of answers 200, refused, broken."""

    def __init__(self, plan: _Plan) -> None:
        self.latencies: list[float] = []
        self.refused = self.broken = 0
        self._plan = plan
        self._requests = itertools.cycle(plan.requests)
        self._idle: list[Connection] = []

    async def send(self, moment: float, end: float = float("inf")) -> None:
        """Send the next request and count its answer, if it came before the end."""
        try:
            connection = self._idle.pop() if self._idle else None
            if connection is None or connection.transport.is_closing():
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(Connection, *self._plan.address)
            status = await connection.ask(next(self._requests))
        except OSError:
            self.broken += 1
            return
        self._idle.append(connection)
        if status != 200:
            self.refused += 1
        elif (now := time.perf_counter()) < end:
            self.latencies.append(now - moment)

    async def closed(self) -> None:
        end = time.perf_counter() + self._plan.seconds

        async def one() -> None:
            while (moment := time.perf_counter()) < end:
                await self.send(moment, end)

        await asyncio.gather(*(one() for _ in range(self._plan.connections)))

    async def open(self) -> None:
        gaps = random.Random(self._plan.seed)
        tasks: list[asyncio.Task[None]] = []
        at = started = time.perf_counter() + 0.1
        while (at := at + gaps.expovariate(self._plan.rate)) < started + self._plan.seconds:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send(at)))
        if not tasks:  # the rate is so low that no moment came
            return
        done, waiting = await asyncio.wait(tasks, timeout=_GIVE_UP)
        self.broken += len(waiting)
        for task in done:
            task.result()  # what is not a broken connection is a fault of this program


def _request(protocol: Protocol, host: str, body: bytes) -> bytes:
    headers = {"Host": host, "Content-Length": str(len(body))} | protocol.headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {protocol.path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _follow(plan: _Plan) -> tuple[list[float], int, int]:
    """Send in this process, and return the latencies, and how many were refused and how many broken."""
    gc.disable()
    sender = _Sender(plan)
    time.sleep(max(0.0, plan.begin - time.time()))
    uvloop.run(sender.closed() if plan.connections else sender.open())
    return sender.latencies, sender.refused, sender.broken
