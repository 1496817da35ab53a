"""What honest callers notice of an attack: `python -m benchmarks.reliability.attacks`.

Ten honest requests a second, as a Poisson process, first alone and then beside each attack:

- crawlers: 300 connections that send one byte of a body and no more, and are opened again when they are closed
- maps: 48 callers that always ask for a map of 2048 pixels
- pictures: four callers that send a PNG of 64 megapixels and 0.5 MB, every row filtered by Paeth, and leave after 1 s

- hostile: sixteen pictures whose structure costs more than they look, one a second, for 20 s; `--seed` draws others

Then the engine is killed under 16 callers that ask again at once, with two web workers. The callers run on the cores of
the service, as an attacker's would not.

`--hostile` runs that attack alone. It takes the samples of `$VIT_SHARED/data/hostile` first, where they are there.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import random
import selectors
import signal
import socket
import statistics
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.checkpoints import REPOSITORY
from benchmarks.process_tree import ProcessTree
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability.service_process import ServiceProcess
from tests.fuzz import costs

_RATE = 10.0
_CRAWLERS, _MAPPERS, _SENDERS, _RETRIERS = 300, 48, 4, 16
_SIDE = 8000
_HOSTILE, _HOSTILE_SECONDS = 16, 20.0
_HEADERS = {"Content-Type": "image/jpeg"}
_CRAWL = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\nx"


def paeth_png(side: int) -> bytes:
    """Return a black square of 16-bit RGBA, every row of which is filtered by Paeth (PNG, ISO/IEC 15948)."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    packer = zlib.compressobj(9)
    row = bytes([4]) + bytes(8 * side)
    packed = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Return the status and the body of an answer; status 0 where there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, _HEADERS if body else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def honest(port: int, body: bytes, seconds: float) -> tuple[int, list[float]]:
    """Return how many were asked, and the seconds of those that were answered 200.

    They come at random moments: a Poisson process, given the number of its events.
    """
    answered: list[float] = []
    threads: list[threading.Thread] = []

    def one() -> None:
        started = time.perf_counter()
        if ask(port, "POST", "/classify", body)[0] == 200:
            answered.append(time.perf_counter() - started)

    begin = time.monotonic()
    for moment in sorted(random.uniform(0, seconds) for _ in range(round(_RATE * seconds))):
        time.sleep(max(0.0, begin + moment - time.monotonic()))
        threads.append(threading.Thread(target=one))
        threads[-1].start()
    for thread in threads:
        thread.join()
    return len(threads), answered


def hostile(port: int, seed: int, samples: Path) -> list[dict[str, Any]]:
    """Send sixteen hostile pictures, one a second, and return name, size, status and seconds of each."""
    sent: list[dict[str, Any]] = []
    threads: list[threading.Thread] = []

    def one(name: str, data: bytes) -> None:
        started = time.perf_counter()
        status = ask(port, "POST", "/classify", data)[0]
        sent.append({"name": name, "bytes": len(data), "status": status, "seconds": time.perf_counter() - started})

    files = list(itertools.islice(costs.files(seed, samples), _HOSTILE))  # made before, not beside the measurement
    for name, data in files:
        threads.append(threading.Thread(target=one, args=(name, data)))
        threads[-1].start()
        time.sleep(1)
    for thread in threads:
        thread.join()
    return sent


def beside_hostile(folder: Path, body: bytes, seed: int) -> dict[str, Any]:
    """Return what 200 honest callers notice of the hostile pictures in 20 s, and how much memory these take."""
    samples = Path(os.environ.get("VIT_SHARED", REPOSITORY.parent / "shared")) / "data" / "hostile"
    service = ServiceProcess(folder / "hostile-log", {"VIT_DRAIN_DELAY": "0", "VIT_DRAIN_TIMEOUT": "3"})
    sent: list[dict[str, Any]] = []
    try:
        service.wait_until_ready()
        honest(service.port, body, 2)
        tree = ProcessTree(service.pid)
        used = tree.processor_seconds()
        attack = threading.Thread(target=lambda: sent.extend(hostile(service.port, seed, samples)))
        with tree.growth(interval=0.1) as growth:
            attack.start()
            asked, answered = honest(service.port, body, _HOSTILE_SECONDS)
            attack.join()
        p50, p95, p99 = milliseconds(answered)
        return {
            "seed": seed,
            "asked": asked,
            "answered": len(answered),
            "p50_ms": p50,
            "p95_ms": p95,
            "p99_ms": p99,
            "growth_mib": round(growth.bytes / 2**20, 1),
            "processor_seconds": round(tree.processor_seconds() - used, 2),
            "hostile": sent,
        }
    finally:
        service.stop()


def milliseconds(answered: Sequence[float]) -> tuple[float, float, float]:
    """Return p50, p95 and p99 of seconds, in milliseconds; not a number where hardly any were answered."""
    if len(answered) < 2:
        return math.nan, math.nan, math.nan
    cuts = [1000 * cut for cut in statistics.quantiles(answered, n=100, method="inclusive")]
    return cuts[49], cuts[94], cuts[98]


def crawl(port: int, stop: threading.Event) -> None:
    """Keep `_CRAWLERS` connections open that send next to nothing."""
    waiting = selectors.DefaultSelector()

    def connect() -> None:
        own = socket.socket()
        own.setblocking(False)
        own.connect_ex(("127.0.0.1", port))
        waiting.register(own, selectors.EVENT_WRITE)

    for _ in range(_CRAWLERS):
        connect()
    while not stop.is_set():
        for key, events in waiting.select(0.1):
            own = key.fileobj
            assert isinstance(own, socket.socket)
            try:
                if events & selectors.EVENT_WRITE:
                    own.send(_CRAWL)
                    waiting.modify(own, selectors.EVENT_READ)
                    continue
                if own.recv(4096):
                    continue
            except OSError:
                pass
            waiting.unregister(own)
            own.close()
            connect()
    for key in list(waiting.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    waiting.close()


def leave_early(port: int, body: bytes, stop: threading.Event) -> None:
    """Send a picture and leave after a second, again and again."""
    head = b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    while not stop.is_set():
        # Whoever is refused while it still sends is cut, and comes again.
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as own:
            own.sendall(head + body)
            time.sleep(1)


def beside(count: int, attack: Callable[[threading.Event], None], measure: Callable[[], None]) -> None:
    """Measure while `count` threads attack, from two seconds after their start."""
    stop = threading.Event()
    threads = [threading.Thread(target=attack, args=(stop,)) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    try:
        measure()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def seconds_to_ready(service: ServiceProcess, body: bytes) -> float:
    """Return how long a service is not ready after its engine is killed under callers that ask again after 20 ms."""
    found: list[float] = []

    def callers(stop: threading.Event) -> None:
        while not stop.is_set():
            if ask(service.port, "POST", "/classify", body)[0] != 200:
                time.sleep(0.02)

    def kill() -> None:
        [engine] = service.engines()
        started = time.monotonic()
        os.kill(engine, signal.SIGKILL)
        time.sleep(0.3)
        while engine in service.engines() or not service.engines() or not service.is_ready():
            time.sleep(0.05)
        found.append(time.monotonic() - started)

    beside(_RETRIERS, callers, kill)
    return found[0]


def main() -> None:
    """Run the attacks, print their results and save the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement but the hostile one")
    parser.add_argument("--hostile", action="store_true", help="the hostile pictures alone")
    parser.add_argument("--seed", type=int, default=1, help="of the hostile pictures")
    parser.add_argument("--record", type=Path, default=RESULTS / "attacks.json")
    arguments = parser.parse_args()
    files, origin = pictures.ensure()
    body = files[0].read_bytes()
    record = Record(arguments.record, dtype="auto", about={"pictures": origin, "model": "bundled"})
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.hostile:
            _every_other(Path(folder), body, arguments.seconds, record)
        result = beside_hostile(Path(folder), body, arguments.seed)
    record.section("hostile")[str(arguments.seed)] = result
    record.save()
    each = [(file["name"], file["bytes"], file["status"], f"{file['seconds']:.2f}") for file in result["hostile"]]
    print(table(["hostile", "bytes", "status", "seconds"], each))
    print(table(["beside hostile", ""], [(k, v) for k, v in result.items() if k != "hostile"]), flush=True)


def _every_other(folder: Path, body: bytes, seconds: float, record: Record) -> None:
    rows: list[tuple[object, ...]] = []

    def measure(what: str) -> None:
        asked, answered = honest(service.port, body, seconds)
        rows.append((what, asked, len(answered), *milliseconds(answered)))

    service = ServiceProcess(folder / "log", {"VIT_DRAIN_DELAY": "0", "VIT_DRAIN_TIMEOUT": "3"})
    try:
        service.wait_until_ready()
        honest(service.port, body, 2)
        measure("alone")
        beside(1, lambda stop: crawl(service.port, stop), lambda: measure("crawlers"))
        path = "/attention?size=2048&id=" + json.loads(ask(service.port, "POST", "/classify", body)[1])["id"]

        def draw(stop: threading.Event) -> None:
            while not stop.is_set():
                ask(service.port, "GET", path)

        beside(_MAPPERS, draw, lambda: measure("maps"))
        large = paeth_png(_SIDE)
        beside(_SENDERS, lambda stop: leave_early(service.port, large, stop), lambda: measure("pictures"))
    finally:
        service.stop()
    columns = ["beside", "asked", "answered 200", "p50 ms", "p95 ms", "p99 ms"]
    print(table(columns, rows), flush=True)
    record.data["beside"] = [dict(zip(columns, row, strict=True)) for row in rows]
    service = ServiceProcess(folder / "log", {"VIT_WORKERS": "2", "VIT_DRAIN_DELAY": "0"})
    try:
        service.wait_until_ready()
        ready = record.data["seconds_to_ready"] = seconds_to_ready(service, body)
        print(f"ready {ready:.1f} s after the engine was killed under {_RETRIERS} callers")
    finally:
        service.stop()
    record.save()


if __name__ == "__main__":
    main()
