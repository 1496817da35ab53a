"""Load on a server: closed loops by `wrk` where it is installed, open loops and all else by processes of our own.

    python -m benchmarks.load < PLAN.json        (one of these processes; `Loader` starts them)

Closed: each connection sends its next request when it has its answer. Open: requests leave at the moments of a Poisson
process from a seed, whatever the server does; a latency counts from that moment, so that a stall is charged to every
request that it delays. A `Protocol` says how a server wants its picture; the load is the same for all.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httptools

_SCRIPT = """
local requests, turn = {}, 0
function init(args)
  local files = {%s}
  for i, name in ipairs(files) do
    local file = assert(io.open(name, "rb"))
    requests[i] = wrk.format("POST", %s, {%s}, file:read("*a"))
    file:close()
  end
end
function request()
  turn = turn %% #requests + 1
  return requests[turn]
end
function done(summary, latency, requests)
  io.write(string.format("RESULT requests=%%d us=%%d status=%%d connect=%%d read=%%d write=%%d timeout=%%d" ..
    " p50=%%d p90=%%d p99=%%d max=%%d\\n", summary.requests, summary.duration, summary.errors.status,
    summary.errors.connect, summary.errors.read, summary.errors.write, summary.errors.timeout, latency:percentile(50),
    latency:percentile(90), latency:percentile(99), latency.max))
end
"""
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


def parse_wrk(output: str) -> Load:
    """The `RESULT` line of our script; raises `ValueError` where there is none."""
    found = re.search(r"^RESULT (.*)$", output, re.MULTILINE)
    if found is None:
        raise ValueError(f"wrk gave no result:\n{output}")
    values = {name: int(value) for name, value in (pair.split("=") for pair in found[1].split())}
    milliseconds = {name: values[name] / 1000 for name in ("p50", "p90", "p99", "max")}
    broken = values["connect"] + values["read"] + values["write"] + values["timeout"]
    answered = values["requests"] - values["status"]
    return Load(rate=answered / (values["us"] / 1e6), refused=values["status"], broken=broken, **milliseconds)


class Loader:
    """Sends one picture set to a server; made by `loader`.

    Args:
        processes: that send where `wrk` does not.
    """

    def __init__(self, folder: Path, bodies: Sequence[Path], protocol: Protocol, processes: int = 1) -> None:
        self._folder = folder
        self._protocol = protocol
        self._bodies = [str(body) for body in bodies]
        self._processes = processes
        self._script = folder / "load.lua"
        headers = ", ".join(f"[{json.dumps(name)}] = {json.dumps(value)}" for name, value in protocol.headers.items())
        files = ", ".join(map(json.dumps, self._bodies))
        self._script.write_text(_SCRIPT % (files, json.dumps(protocol.path), headers))

    def closed(self, url: str, *, connections: int, seconds: float) -> Load:
        """As many requests under way as connections; `wrk` measures whole seconds, with one thread."""
        if shutil.which("wrk") is None:
            return self._own(url, seconds, connections=connections)
        whole = max(1, round(seconds))
        command = ["wrk", "-t1", f"-c{connections}", f"-d{whole}s", "--timeout", "30s", "-s", str(self._script), url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=whole + 60, check=True)
        return parse_wrk(done.stdout)

    def open(self, url: str, *, rate: float, seconds: float) -> Load:
        """Requests at moments that do not depend on the answers."""
        return self._own(url, seconds, rate=rate)

    def _own(self, url: str, seconds: float, *, connections: int | None = None, rate: float = 0.0) -> Load:
        """Send from processes of `benchmarks.load`; raises `subprocess.CalledProcessError` if one fails."""
        count = self._processes if connections is None else min(self._processes, connections)
        common = {"url": url, "path": self._protocol.path, "headers": self._protocol.headers, "bodies": self._bodies}
        begin = time.time() + (_HEAD_START if count > 1 else 0)
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        started = []
        for index in range(count):
            share = {"connections": connections // count + (index < connections % count)} if connections else {}
            plan = common | {"seconds": seconds, "begin": begin, "seed": index, "rate": rate / count} | share
            # The result goes into a file: longer than a pipe's buffer, it came out of one cut short.
            plan["result"] = str(self._folder / f"{index}.json")
            command = [sys.executable, "-m", "benchmarks.load"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, text=True)
            assert process.stdin is not None
            process.stdin.write(json.dumps(plan))
            process.stdin.close()
            started.append(process)
        for process in started:
            if process.wait(timeout=seconds + 120):
                raise subprocess.CalledProcessError(process.returncode, "benchmarks.load")
        found = [json.loads((self._folder / f"{index}.json").read_text()) for index in range(count)]
        latencies = list(itertools.chain.from_iterable(each["latencies"] for each in found))
        return Load.of(latencies, sum(e["refused"] for e in found), sum(e["broken"] for e in found), seconds)


@contextmanager
def loader(pictures: Sequence[Path], protocol: Protocol, processes: int = 1) -> Iterator[Loader]:
    """The bodies of the pictures in a folder that lives as long as the context."""
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as name:
        folder = Path(name)
        bodies = []
        for picture in pictures:
            body = folder / picture.with_suffix(".body").name
            body.write_bytes(protocol.wrap(picture.read_bytes()))
            bodies.append(body)
        yield Loader(folder, bodies, protocol, processes)


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


class _Sender:
    """One process's requests and what became of them: seconds of answers 200, refused, broken."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.latencies: list[float] = []
        self.refused = self.broken = 0
        self._plan = plan
        self._url = urlsplit(plan["url"])
        requests = [_request(plan, self._url.netloc, Path(body).read_bytes()) for body in plan["bodies"]]
        self._requests = itertools.cycle(requests)
        self._idle: list[Connection] = []

    async def send(self, moment: float, end: float = float("inf")) -> None:
        """Send the next request and count its answer, if it came before the end."""
        try:
            connection = self._idle.pop() if self._idle else None
            if connection is None or connection.transport.is_closing():
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(Connection, self._url.hostname, self._url.port)
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
        end = time.perf_counter() + self._plan["seconds"]

        async def one() -> None:
            while (moment := time.perf_counter()) < end:
                await self.send(moment, end)

        await asyncio.gather(*(one() for _ in range(self._plan["connections"])))

    async def open(self) -> None:
        gaps = random.Random(self._plan["seed"])
        tasks: list[asyncio.Task[None]] = []
        at = started = time.perf_counter() + 0.1
        while (at := at + gaps.expovariate(self._plan["rate"])) < started + self._plan["seconds"]:
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.create_task(self.send(at)))
        if not tasks:  # the rate is so low that no moment came
            return
        done, waiting = await asyncio.wait(tasks, timeout=_GIVE_UP)
        self.broken += len(waiting)
        for task in done:
            task.result()  # what is not a broken connection is a fault of this program


def _request(plan: dict[str, Any], host: str, body: bytes) -> bytes:
    headers = {"Host": host, "Content-Length": str(len(body))} | plan["headers"]
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {plan['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


async def _follow(plan: dict[str, Any]) -> None:
    gc.disable()
    sender = _Sender(plan)
    await asyncio.sleep(max(0.0, plan["begin"] - time.time()))
    await (sender.closed() if "connections" in plan else sender.open())
    found = {"latencies": sender.latencies, "refused": sender.refused, "broken": sender.broken}
    Path(plan["result"]).write_text(json.dumps(found))


if __name__ == "__main__":
    import uvloop

    uvloop.run(_follow(json.load(sys.stdin)))
