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
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

_GIVE_UP = 30.0
"""Seconds after the last planned moment."""
_HEAD_START = 2.0
"""Seconds that several processes have to start, so that they begin together."""
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


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
        p50, p99, max: milliseconds until the answer.
        refused: answers with another status.
        broken: connections that failed, and requests without an answer.
    """

    rate: float
    p50: float
    p99: float
    max: float
    refused: int
    broken: int

    @classmethod
    def of(cls, latencies: Sequence[float], refused: int, broken: int, seconds: float) -> Load:
        """From the seconds of each answer 200."""
        if not latencies:
            return cls(0.0, 0.0, 0.0, 0.0, refused, broken)
        ms = sorted(1000 * latency for latency in latencies)
        cuts = statistics.quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
        return cls(len(ms) / seconds, cuts[49], cuts[98], ms[-1], refused, broken)

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


class Loader:
    """Sends one picture set to a server, by each protocol in turn.

    Args:
        processes: that send.
    """

    def __init__(self, pictures: Sequence[Path], *protocols: Protocol, processes: int = 1) -> None:
        each = itertools.product([picture.read_bytes() for picture in pictures], protocols)
        self._requests = [_request(protocol, protocol.wrap(picture)) for picture, protocol in each]
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
        shares = [connections // count + (index < connections % count) for index in range(count)]
        senders = [
            _Sender((host, int(port)), self._requests, seconds, share, rate / count, seed)
            for seed, share in enumerate(shares)
        ]
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            found = list(pool.map(partial(_run, begin), senders, timeout=seconds + 120))
        latencies = list(itertools.chain.from_iterable(each[0] for each in found))
        return Load.of(latencies, sum(each[1] for each in found), sum(each[2] for each in found), seconds)


async def arrivals(rate: float, seconds: float, seed: int | str) -> AsyncIterator[float]:
    """Wait for each moment of a Poisson process of so many a second, and yield it, in seconds of the clock."""
    gaps, at = random.Random(seed), time.perf_counter()
    end = at + seconds
    while (at := at + gaps.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        yield at


@dataclass
class _Sender:
    """One process's requests and what became of them: seconds of answers 200, refused, broken."""

    address: tuple[str, int]
    requests: list[bytes]
    seconds: float
    connections: int
    rate: float
    seed: int
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    broken: int = 0

    async def run(self) -> None:
        """Send in a closed loop over the connections, or at the rate where there are none."""
        self._requests, self._idle = itertools.cycle(self.requests), list[_Connection]()
        if self.connections:
            end = time.perf_counter() + self.seconds
            await asyncio.gather(*(self._again(end) for _ in range(self.connections)))
            return
        tasks = [asyncio.create_task(self._send(at)) async for at in arrivals(self.rate, self.seconds, self.seed)]
        if tasks:  # the rate may be so low that no moment came
            done, waiting = await asyncio.wait(tasks, timeout=_GIVE_UP)
            self.broken += len(waiting)
            await asyncio.gather(*done)  # what is not a broken connection is a fault of this program

    async def _again(self, end: float) -> None:
        while (moment := time.perf_counter()) < end:
            await self._send(moment, end)

    async def _send(self, moment: float, end: float = float("inf")) -> None:
        """Send the next request and count its answer, if it came before the end."""
        try:
            reader, writer = self._idle.pop() if self._idle else await asyncio.open_connection(*self.address)
            writer.write(next(self._requests))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(int(head.partition(b"\ncontent-length:")[2].split(maxsplit=1)[0]))
        except (OSError, EOFError):
            self.broken += 1
            return
        if b"\nconnection: close" in head:
            writer.close()
        else:
            self._idle.append((reader, writer))
        if head.split(maxsplit=2)[1] != b"200":
            self.refused += 1
        elif (now := time.perf_counter()) < end:
            self.latencies.append(now - moment)


def _request(protocol: Protocol, body: bytes) -> bytes:
    headers = {"Host": "127.0.0.1", "Content-Length": str(len(body))} | protocol.headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {protocol.path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _run(begin: float, sender: _Sender) -> tuple[list[float], int, int]:
    """Send in this process, and return the latencies, and how many were refused and how many broken."""
    gc.disable()
    time.sleep(max(0.0, begin - time.time()))
    uvloop.run(sender.run())
    return sender.latencies, sender.refused, sender.broken
