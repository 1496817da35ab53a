"""A real service under real load while it is hurt: `python -m benchmarks.reliability.chaos`, or `make chaos`.

First with one process, then with two web workers, every few seconds one of: the engine, a worker or the whole service
is killed or stopped; its disk is full; hundreds of callers crawl; hostile pictures arrive. The traffic never stops. One
table tells what became of every request, another what each hurt did. Exit code 1 when a request was lost or mixed up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability.http_caller import HttpCaller, NotConnected
from benchmarks.reliability.service_process import ServiceProcess
from benchmarks.reliability.traffic import FAULTS, Kind, Outcome, Traffic, capacity, crawling_head, learn

_PATIENCE = 12.0
"""Seconds: the service promises an answer within VIT_REQUEST_TIMEOUT (10 s) and a little."""
_DISK_MIB = 64
_CRAWLERS = 300
_CUT_SECONDS = 12.0
"""Until then after a kill a connection may end without an answer: a frozen worker is noticed and killed."""
_SETTINGS = {"VIT_DRAIN_DELAY": "0"}
_CONFIGURATIONS: dict[str, dict[str, str]] = {"one process": {}, "two workers": {"VIT_WORKERS": "2"}}

Hurt = Callable[[], Coroutine[None, None, None]]


class Chaos:
    """Hurts one service, one way after the other."""

    def __init__(self, service: ServiceProcess, disk: Path | None) -> None:
        self.last_kill = 0.0
        self._service = service
        self._disk = disk

    def killed_lately(self) -> bool:
        """Whether connections may have ended with their process."""
        return time.monotonic() - self.last_kill < _CUT_SECONDS

    def hurts(self, configuration: str) -> dict[str, Hurt]:
        """Return what can be done to a service of that configuration, by name."""
        common: dict[str, Hurt] = {
            "300 callers crawl": self._crawl,
            "hostile pictures, callers leave": self._hostile,
            "SIGTERM and start": self._terminate,
        }
        if self._disk is not None:
            common["disk full for 5 s"] = self._fill_disk
        if configuration == "one process":
            return common | {"kill -9 the service": self._kill_service}
        return common | {
            "kill -9 the engine": lambda: self._signal_one(self._service.engines, signal.SIGKILL),
            "kill -9 a worker": lambda: self._signal_one(self._service.workers, signal.SIGKILL, holds_callers=True),
            "SIGSTOP the engine": lambda: self._signal_one(self._service.engines, signal.SIGSTOP),
            "SIGSTOP a worker": lambda: self._signal_one(self._service.workers, signal.SIGSTOP, holds_callers=True),
        }

    async def _signal_one(
        self, processes: Callable[[], list[int]], number: signal.Signals, *, holds_callers: bool = False
    ) -> None:
        found = processes()
        if not found:
            return
        if holds_callers:
            self.last_kill = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[0], number)

    async def _kill_service(self) -> None:
        self.last_kill = time.monotonic()
        self._service.signal(signal.SIGKILL)

    async def _terminate(self) -> None:
        self._service.signal(signal.SIGTERM)

    async def _crawl(self) -> None:
        caller = HttpCaller("127.0.0.1", self._service.port, patience=_PATIENCE)

        async def one() -> None:
            with contextlib.suppress(NotConnected):
                await caller.crawl(crawling_head(), 6)

        await asyncio.gather(*(one() for _ in range(_CRAWLERS)))

    async def _hostile(self) -> None:
        caller = HttpCaller("127.0.0.1", self._service.port, patience=_PATIENCE)
        body = await asyncio.to_thread(paeth_png, 7000)
        head = f"POST /classify HTTP/1.1\r\nHost: vitserve\r\nContent-Length: {len(body)}\r\n\r\n".encode()

        async def one() -> None:
            with contextlib.suppress(NotConnected):
                await caller.leave(head + body, 1)

        await asyncio.gather(*(one() for _ in range(4)))

    async def _fill_disk(self) -> None:
        assert self._disk is not None
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as out:
            while True:
                out.write(bytes(1 << 20))
        await asyncio.sleep(5)
        filler.unlink()


def paeth_png(edge: int) -> bytes:
    """Return a small file that is slow to decode: a square grey picture, each line of which has the Paeth filter."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    packed = zlib.compressobj(9)
    row = b"\x04" + bytes(3 * edge)
    rows = b"".join(packed.compress(row) for _ in range(edge)) + packed.flush()
    header = edge.to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A file system of its own that can be filled; None without the right to mount one."""
    with tempfile.TemporaryDirectory(prefix="vitserve-chaos-") as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m", "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            print("The disk is not filled: that needs the right to mount a file system.", file=sys.stderr)
            yield None
            return
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


async def hurt_one(configuration: str, arguments: argparse.Namespace, files: list[bytes]) -> dict[str, Any]:
    """Run one configuration; return counts, hurts and notes."""
    with tempfile.TemporaryDirectory(prefix="vitserve-chaos-") as folder, small_disk() as disk:
        settings = _SETTINGS | _CONFIGURATIONS[configuration] | ({"TMPDIR": str(disk)} if disk else {})
        service = ServiceProcess(Path(folder) / "log", settings)
        try:
            await asyncio.to_thread(service.wait_until_ready)
            caller = HttpCaller("127.0.0.1", service.port, patience=_PATIENCE)
            known = await learn(caller, files)
            peak = await capacity(caller, known, 5)
            rate = arguments.load * peak
            chaos = Chaos(service, disk)
            traffic = Traffic(caller, known, seed=arguments.seed, killed=chaos.killed_lately)
            seconds = 60 * arguments.minutes / len(_CONFIGURATIONS)
            hurts: dict[str, list[dict[str, float]]] = defaultdict(list)
            sending = asyncio.create_task(traffic.run(rate, seconds))
            names = list(chaos.hurts(configuration))
            turn = 0
            await asyncio.sleep(3)
            while not sending.done() and turn * arguments.every < seconds - arguments.every:
                name = names[turn % len(names)]
                turn += 1
                hurts[name].append(await _watch(service, traffic, chaos.hurts(configuration)[name], arguments.every))
            await sending
            ready = await asyncio.to_thread(service.wait_until_ready)
            exit_code = await asyncio.to_thread(service.stop)
        finally:
            service.stop()
        if traffic.faults:
            print("\n".join(traffic.notes[:20]), service.log[-4000:], sep="\n", file=sys.stderr)
    return {
        "capacity": round(peak, 1),
        "rate": round(rate, 1),
        "seconds": seconds,
        "outcomes": {
            str(kind): {
                str(outcome): traffic.counts[kind, outcome] for outcome in Outcome if traffic.counts[kind, outcome]
            }
            for kind in Kind
        },
        "hurts": {
            name: {
                "times": len(found),
                "longest_gap_s": round(max(one["gap"] for one in found), 2),
                "not_ready_s": round(max(one["not_ready"] for one in found), 2),
            }
            for name, found in hurts.items()
        },
        "ready_at_the_end_s": round(ready, 2),
        "exit_code": exit_code,
    }


async def _watch(service: ServiceProcess, traffic: Traffic, hurt: Hurt, seconds: float) -> dict[str, float]:
    """Hurt, and look for so long: the longest time without a right answer, and when it was ready again for good."""
    began = time.monotonic()
    hurting = asyncio.create_task(hurt())
    last_not_ready = began
    while time.monotonic() - began < seconds or time.monotonic() - last_not_ready < 1:
        if not await asyncio.to_thread(service.is_ready):
            last_not_ready = time.monotonic()
            service.restart_if_ended()
        await asyncio.sleep(0.1)
    await hurting
    moments = [began, *(moment for moment in traffic.right_moments if moment > began), time.monotonic()]
    return {
        "gap": max(after - before for before, after in pairwise(moments)),
        "not_ready": last_not_ready - began,
    }


def main() -> int:
    """Run all configurations, print their tables, save the record."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    about = {"pictures": origin, "model": "bundled", "seed": arguments.seed, "load": arguments.load}
    arguments.record.unlink(missing_ok=True)
    record = Record(arguments.record, dtype="auto", about=about)
    bodies = [file.read_bytes() for file in files]
    failed = False
    for configuration in _CONFIGURATIONS:
        found = asyncio.run(hurt_one(configuration, arguments, bodies))
        record.section("configurations")[configuration] = found
        record.save()
        failed |= _print(configuration, found)
    return int(failed)


def _print(configuration: str, found: dict[str, Any]) -> bool:
    """Print the tables of a configuration, and return whether something happened that must not."""
    totals = {
        str(outcome): sum(counts.get(str(outcome), 0) for counts in found["outcomes"].values()) for outcome in Outcome
    }
    sent = sum(totals.values())
    print(f"\n## {configuration}: {sent} requests in {found['seconds']:.0f} s, {found['rate']} a second\n")
    rows = [[kind, *(counts.get(str(outcome), 0) for outcome in Outcome)] for kind, counts in found["outcomes"].items()]
    print(table(["", *map(str, Outcome)], [*rows, ["all", *totals.values()]]))
    print()
    hurts = [[name, *values.values()] for name, values in found["hurts"].items()]
    print(table(["hurt", "times", "longest time without a right answer, s", "until ready for good, s"], hurts))
    print(f"\nstopped in order at the end: exit code {found['exit_code']}", flush=True)
    return found["exit_code"] != 0 or any(totals[str(fault)] for fault in FAULTS)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10, help="of all configurations together")
    parser.add_argument("--every", type=float, default=10, help="seconds from one hurt to the next")
    parser.add_argument("--load", type=float, default=0.3, help="share of the capacity that is sent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, default=RESULTS / "chaos.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
