"""Load on a server: closed and open loops.

Closed: each connection sends its next request when it has its answer. Open: requests leave at the
moments of a Poisson process from a seed, whatever the server does; a latency counts from that
moment, so that a stall is charged to every request that it delays. A `Protocol` says how a server
wants its picture; the load is the same for all.
"""

import asyncio
import gc
import itertools
import multiprocessing
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

# Seconds after the last planned moment.
_GIVE_UP = 30.0
# Seconds that several processes have to start, so that they begin together.
_HEAD_START = 2.0
# The seconds of each answer 200, how many were refused, and how many broken.
_Sent = tuple[list[float], int, int]


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

    def as_json(self) -> dict[str, Any]:
        """For a record."""
        return {
            name: round(value, 3) if isinstance(value, float) else value
            for name, value in asdict(self).items()
        }


class Loader:
    """Sends one picture set to a server, by each protocol in turn.

    Args:
        processes: that send.
    """

    def __init__(self, pictures: Sequence[Path], *protocols: Protocol, processes: int = 1) -> None:
        each = itertools.product([picture.read_bytes() for picture in pictures], protocols)
        self._requests = [_request(protocol, protocol.wrap(picture)) for picture, protocol in each]
        self._processes = processes

    def run(self, url: str, *, seconds: float, connections: int = 0, rate: float = 0.0) -> Load:
        """Keep so many requests under way, or else send at a rate.

        Several processes begin together.
        """
        count = min(self._processes, connections) if connections else self._processes
        begin = time.time() + (_HEAD_START if count > 1 else 0)
        host, _, port = url.removeprefix("http://").partition(":")
        shares = [connections // count + (index < connections % count) for index in range(count)]
        send = partial(_send, (host, int(port)), self._requests, seconds, rate / count)
        with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
            work = [
                pool.submit(_run, begin, partial(send, share, seed))
                for seed, share in enumerate(shares)
            ]
            found = [each.result(timeout=seconds + 120) for each in work]
        latencies = list(itertools.chain.from_iterable(each[0] for each in found))
        ms = sorted(1000 * latency for latency in latencies) or [0.0]
        cuts = statistics.quantiles(ms, n=100, method="inclusive") if len(ms) > 1 else ms * 99
        refused = sum(each[1] for each in found)
        broken = sum(each[2] for each in found)
        return Load(len(latencies) / seconds, cuts[49], cuts[98], ms[-1], refused, broken)


async def arrivals(rate: float, seconds: float, seed: int | str) -> AsyncIterator[float]:
    """Wait for each moment of a Poisson process of so many a second, and yield it, in seconds of
    the clock.
    """
    gaps = random.Random(seed)
    at = time.perf_counter()
    end = at + seconds
    while (at := at + gaps.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        yield at


async def _send(
    address: tuple[str, int],
    requests: Sequence[bytes],
    seconds: float,
    rate: float,
    connections: int,
    seed: int,
) -> _Sent:
    """Send in a closed loop over the connections; without connections, at the rate."""
    turn = itertools.cycle(requests)
    idle = list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
    latencies = list[float]()
    counts = Counter[str]()

    async def one(moment: float, end: float = float("inf")) -> None:
        """Send the next request and count its answer, if it came before the end."""
        try:
            reader, writer = idle.pop() if idle else await asyncio.open_connection(*address)
            writer.write(next(turn))
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            await reader.readexactly(
                int(head.partition(b"\ncontent-length:")[2].split(maxsplit=1)[0])
            )
        except (OSError, EOFError):
            counts["broken"] += 1
            return
        if b"\nconnection: close" in head:
            writer.close()
        else:
            idle.append((reader, writer))
        if head.split(maxsplit=2)[1] != b"200":
            counts["refused"] += 1
        elif (now := time.perf_counter()) < end:
            latencies.append(now - moment)

    async def again(end: float) -> None:
        while (moment := time.perf_counter()) < end:
            await one(moment, end)

    if connections:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(again(end) for _ in range(connections)))
    else:
        tasks = [asyncio.create_task(one(at)) async for at in arrivals(rate, seconds, seed)]
        if tasks:  # the rate may be so low that no moment came
            done, waiting = await asyncio.wait(tasks, timeout=_GIVE_UP)
            counts["broken"] += len(waiting)
            await asyncio.gather(*done)  # errors other than broken connections are bugs here
    return latencies, counts["refused"], counts["broken"]


def _request(protocol: Protocol, body: bytes) -> bytes:
    headers = {"Host": "127.0.0.1", "Content-Length": str(len(body))} | protocol.headers
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {protocol.path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _run(begin: float, send: Callable[[], Coroutine[None, None, _Sent]]) -> _Sent:
    """Send in this process."""
    gc.disable()
    time.sleep(max(0.0, begin - time.time()))
    return uvloop.run(send())
