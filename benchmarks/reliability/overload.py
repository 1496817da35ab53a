"""Many times more requests than can be answered: `python -m benchmarks.reliability.overload`.

First the peak (a closed loop of 32 connections), then an open loop at a multiple of it, in turn. Told are the medians
over the rounds: the share of the peak that is still answered, how late accepted requests are answered, and how soon the
others are refused. Then closed loops of 256 and 512 connections in turn. The load comes from the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import pictures
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability.http_caller import Cut, HttpCaller, NoAnswer, NotConnected
from benchmarks.reliability.service_process import ServiceProcess
from benchmarks.reliability.traffic import Picture, capacity, learn, post

_PATIENCE = 15.0


async def flood(caller: HttpCaller, known: Sequence[Picture], rate: float, seconds: float) -> dict[str, float]:
    """Send at a rate, whatever is answered; return what became of the requests."""
    loop = asyncio.get_running_loop()
    chosen = random.Random(0)
    answered: list[float] = []
    refused: list[float] = []
    lost = 0
    tasks: set[asyncio.Task[None]] = set()

    async def one(request: bytes) -> None:
        nonlocal lost
        began = time.perf_counter()
        try:
            answer = await caller.ask(request)
        except (Cut, NoAnswer, NotConnected):
            lost += 1
            return
        (answered if answer.status == 200 else refused).append(time.perf_counter() - began)

    requests = [post("/classify", picture.data) for picture in known]
    moment = loop.time()
    end = moment + seconds
    while (moment := moment + chosen.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, moment - loop.time()))
        task = asyncio.create_task(one(chosen.choice(requests)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    took = max(seconds, loop.time() - (end - seconds))
    goodput = len(answered) / took
    await asyncio.gather(*tasks)
    return {
        "sent_per_second": (len(answered) + len(refused) + lost) / took,
        "goodput": goodput,
        "accepted_p99_ms": 1000 * _quantile(answered, 0.99),
        "refused": float(len(refused)),
        "refused_p50_ms": 1000 * _quantile(refused, 0.5),
        "refused_p99_ms": 1000 * _quantile(refused, 0.99),
        "lost": float(lost),
    }


async def measure(arguments: argparse.Namespace, files: list[bytes]) -> dict[str, Any]:
    """Measure all rounds of one service."""
    with tempfile.TemporaryDirectory(prefix="vitserve-overload-") as folder:
        service = ServiceProcess(Path(folder) / "log", {"VIT_DRAIN_DELAY": "0", "VIT_CHECKPOINT": arguments.checkpoint})
        try:
            await asyncio.to_thread(service.wait_until_ready)
            caller = HttpCaller("127.0.0.1", service.port, patience=_PATIENCE)
            known = await learn(caller, files)
            rounds: list[dict[str, float]] = []
            for _ in range(arguments.rounds):
                peak = await capacity(caller, known, arguments.seconds)
                found = await flood(caller, known, arguments.times * peak, arguments.seconds)
                rounds.append({"peak": peak, **found, "share": found["goodput"] / peak})
                few = await capacity(caller, known, arguments.seconds, 256)
                many = await capacity(caller, known, arguments.seconds, 512)
                rounds[-1] |= {"connections_256": few, "connections_512": many, "512_of_256": many / few}
                print({name: round(value, 2) for name, value in rounds[-1].items()}, file=sys.stderr)
            caller.close()
        finally:
            service.stop()
    return {"rounds": rounds, "medians": {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}}


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))] if values else float("nan")


def main() -> int:
    """Measure, print the table, save the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.overload", description=__doc__)
    parser.add_argument("--times", type=float, default=5, help="of the peak that are sent")
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", default="bundled")
    parser.add_argument("--record", type=Path, default=RESULTS / "overload.json")
    arguments = parser.parse_args()
    files, origin = pictures.ensure()
    arguments.record.unlink(missing_ok=True)
    record = Record(arguments.record, dtype="auto", about={"pictures": origin, "model": arguments.checkpoint})
    record.data |= asyncio.run(measure(arguments, [file.read_bytes() for file in files]))
    record.save()
    print(table(["", "median"], record.data["medians"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
