"""Attacks and faults of a real service: `python -m benchmarks.reliability`.

Honest callers ask at the moments of a Poisson process, regardless of the answers. Every answer is
compared with the answer of the quiet service. The first run hurts nothing; then each attack of
`benchmarks.attacks` and each fault of `FAULTS` hurts the service. The table has the share of
answered requests, the median, p99, and faults: lost answers, mixed up answers and wrong statuses.
The exit code is 1 if there was a fault.

During an attack, honest callers of other kinds ask too. The marks are the share of answered
requests of each kind, and p99 compared with the same callers without the attack. Each kind has an
address of its own in 127.0.0.0/8 (Linux), because the service is fair by caller.

    python -m benchmarks.reliability --only avif-batches heic-30 --seconds 20 --workers 1
    python -m benchmarks.reliability --soak 30        # minutes without a fault: does memory grow?

`make chaos` and `make soak` run these too.

All callers share the cores of the service, unlike real attackers. Hostile callers have a process
of their own.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks import pictures
from benchmarks.attack_requests import MODEL, Callers
from benchmarks.attacked_services import ADMIN, KINDS, Service, prepare, settings_of
from benchmarks.attacks import ATTACKS, OTHERS, attack, attacked
from benchmarks.honest import Honest, learn, told_apart
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import VITSERVE, resident_mib

# Marks during an attack: the share of due JPEGs that are answered, and p99 compared with the quiet
# service's.
_LEAST_JPEG = 0.995
_LONGEST = 3.0
# Seconds of a hurt before honest callers come.
_HEAD_START = 2.0
# Outcomes that hostile callers must not see. A refused address, path or host proves nothing about
# the attack; the others are faults of the service.
_WRONG_OUTCOMES = (
    *("404", "405", "421", "500", "not kept"),
    *("INTERNAL", "UNIMPLEMENTED", "UNKNOWN", "ConnectError"),
)
_HEADER = (
    *("due", "answered", "p50 ms", "p99 ms", "faults", "ready after s", "MiB"),
    *("answered of others", "marks"),
)


# Faults. Each gets the service and repeats until it is cancelled.


async def _signals(number: signal.Signals, who: str, service: Service) -> None:
    while True:
        await asyncio.sleep(7)  # so that requests are in flight
        pids = {"engine": service.children(torch=True), "worker": service.children(torch=False)}
        if who != "engine":  # connections may end with it
            service.last_kill = time.monotonic()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pids.get(who, [service.process.pid])[0], number)
        await asyncio.sleep(1)
        await service.until_ready()


async def _load(service: Service, checkpoint: str) -> None:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    body = {"parameters": {"checkpoint": checkpoint}}
    async with httpx.AsyncClient(base_url=service.url, timeout=300, headers=headers) as client:
        answer = await client.post(f"/v2/repository/models/{MODEL}/load", json=body)
    if answer.status_code not in (200, 503):
        raise RuntimeError(f"not loaded: {answer.status_code} {answer.text[:200]}")


async def swaps(service: Service) -> None:
    """Load two checkpoints in turn under the same name, as often as the service allows."""
    for checkpoint in itertools.cycle(["other", "first"]):
        await _load(service, checkpoint)


FAULTS: dict[str, Callable[[Service], Coroutine[Any, Any, None]]] = {
    "swaps": swaps,
    "kill-engine": partial(_signals, signal.SIGKILL, "engine"),
    "kill-worker": partial(_signals, signal.SIGKILL, "worker"),
    "stop-worker": partial(_signals, signal.SIGSTOP, "worker"),
    "kill-service": partial(_signals, signal.SIGKILL, "service"),
    "terminate": partial(_signals, signal.SIGTERM, "service"),
}
"""The faults by name."""

_NEED_WORKERS = {"kill-engine", "kill-worker", "stop-worker"}


# Measurements


@asynccontextmanager
async def _serving(
    settings: Mapping[str, str],
    files: Sequence[bytes],
    ready: Callable[[str], Coroutine[Any, Any, None]] | None = None,
) -> AsyncIterator[Honest]:
    """Start a service, yield honest callers that know its answers, and stop it.

    Args:
        ready: prepares the service at this URL.

    Raises:
        RuntimeError: the service ends with another exit code than 0.
    """
    service = Service(VITSERVE, settings)
    try:
        await service.until_ready()
        if ready is not None:
            await ready(service.url)
        scores = await learn(service.url, files)
        numbers = told_apart(files, scores)
        known = [[scores[number]] for number in numbers]
        yield Honest(service, [files[number] for number in numbers], known)
    finally:
        exit_code = service.stop()
    print(f"stopped in order at the end: exit code {exit_code}")
    if exit_code:
        raise RuntimeError(f"the service ended with {exit_code}")


async def _measure(
    name: str, kinds: Sequence[str], honest: Honest, rate: float, seconds: float
) -> dict[str, Callers]:
    """Let honest callers ask during a hurt, and return all other callers.

    Args:
        name: name of an attack or a fault; another name hurts nothing.
        kinds: kinds of `OTHERS` that ask too.
    """
    url = honest.service.url
    others = {kind: await asyncio.to_thread(OTHERS[kind]) for kind in kinds}
    hurt: Coroutine[Any, Any, Callers | None]
    if name in ATTACKS:
        hurt = attacked(await attack(name, url, seconds + _HEAD_START))
    elif name in FAULTS:
        hurt = FAULTS[name](honest.service)
    else:
        hurt = asyncio.sleep(0)
    hurting = asyncio.create_task(hurt)
    async with asyncio.TaskGroup() as group:
        for callers in others.values():
            group.create_task(callers.run(url, seconds + _HEAD_START))
        await asyncio.sleep(_HEAD_START)
        await honest.run(rate, seconds)
        if hurting.done():
            hurting.result()  # raises a fault of this program
        if name in FAULTS:
            hurting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        attackers = await hurting
        if attackers is not None:
            others["attackers"] = attackers
    return others


@dataclass(frozen=True)
class Quiet:
    """Times of a service that nothing hurts, in milliseconds.

    Attributes:
        p99: time of honest callers of JPEGs.
        medians: time of each other kind of callers.
    """

    p99: float
    medians: Mapping[str, float] = field(default_factory=dict)


def missed(told: Mapping[str, float], quiet: Quiet, others: Mapping[str, Callers]) -> list[str]:
    """Return the missed marks of an attack, each with its figure."""
    marks = []
    if told["answered"] < _LEAST_JPEG:
        marks.append(f"answered {told['answered']:.1%}")
    if not told["p99"] <= _LONGEST * quiet.p99:
        marks.append(f"p99 {told['p99'] / quiet.p99:.1f} x")
    for kind, callers in others.items():
        if callers.counts["200"] < callers.least * callers.counts.total():
            marks.append(f"{kind} {callers}")
        if callers.longest and not callers.median_ms <= callers.longest * quiet.medians[kind]:
            marks.append(f"{kind} p50 {callers.median_ms / quiet.medians[kind]:.1f} x")
    attackers = others.get("attackers")
    if attackers is not None:
        if not attackers.counts:
            marks.append("the attack sent nothing")
        wrong = {name: attackers.counts[name] for name in _WRONG_OUTCOMES}
        marks += [f"attackers got {name}: {count}" for name, count in wrong.items() if count]
    return marks


def _service_of(name: str) -> str:
    """Return the kind of service that an attack or a fault hurts."""
    return ATTACKS[name].service if name in ATTACKS else "vit"


def _runs_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of other callers of each run; a quiet run comes before its first hurt."""
    runs: dict[str, tuple[str, ...]] = {}
    for name in names:
        kinds = ATTACKS[name].beside if name in ATTACKS else ()
        runs.setdefault(", ".join(["honest", *kinds]), kinds)
        runs[name] = kinds
    return runs


async def _know_other(honest: Honest) -> None:
    """Load the other checkpoint, and let its answers count as right too."""
    await _load(honest.service, "other")
    scores = await learn(honest.service.url, honest.bodies)
    honest.known = [[*known, other] for known, other in zip(honest.known, scores, strict=True)]


async def _hurt(
    kind: str, arguments: argparse.Namespace, record: Record, files: Sequence[bytes]
) -> int:
    """Measure one kind of service with and without each hurt, and print the table.

    Returns:
        The number of faults.
    """
    names = [name for name in arguments.only if _service_of(name) == kind]
    if not names:
        return 0
    faults = 0
    rows = []
    quiet: dict[Sequence[str], Quiet] = {}
    with tempfile.TemporaryDirectory(prefix="vitserve-hurt-") as directory:
        folder = Path(directory)
        settings = settings_of(kind, folder, arguments.workers) | _set_by_hand(arguments)
        async with _serving(settings, files, partial(prepare, kind, folder=folder)) as callers:
            for name, kinds in _runs_of(names).items():
                if name == "swaps":
                    await _know_other(callers)
                honest = replace(callers, counts=Counter(), seconds=[])
                others = await _measure(name, kinds, honest, arguments.rate, arguments.seconds)
                told: dict[str, Any] = honest.told()
                told["ready_s"] = await honest.service.until_ready()
                told["resident_mib"] = resident_mib(honest.service.process.pid)
                faults += told["faults"]
                if kinds not in quiet:
                    medians = {other: each.median_ms for other, each in others.items()}
                    quiet[kinds] = Quiet(told["p99"], medians)
                marks = ""
                if name in ATTACKS:
                    marks = ", ".join(missed(told, quiet[kinds], others)) or "met"
                answered = ", ".join(f"{other} {each}" for other, each in others.items())
                rows.append([name, *told.values(), answered, marks])
                counts = {other: each.counts for other, each in others.items()}
                told |= {"counts": {"honest": honest.counts, **counts}, "marks": marks}
                record.section(f"{arguments.workers} workers, {kind}")[name] = told
                record.save()
                print(f"{name}: {told['counts']} {marks}", file=sys.stderr, flush=True)
    print(table([kind, *_HEADER], rows))
    return faults


def _set_by_hand(arguments: argparse.Namespace) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in arguments.setting)


async def hurt_all(arguments: argparse.Namespace, record: Record, files: Sequence[bytes]) -> int:
    """Measure each kind of service, for one number of workers; return the number of faults."""
    return sum([await _hurt(kind, arguments, record, files) for kind in KINDS])


async def soak(arguments: argparse.Namespace, record: Record, files: Sequence[bytes]) -> int:
    """Send mixed requests for some minutes, and print how much the processes grow.

    Returns:
        The number of faults.
    """
    samples: list[dict[str, float]] = []
    settings = {"VIT_RECENT_TTL": "0", "VIT_WORKERS": str(arguments.workers)}
    async with _serving(settings | _set_by_hand(arguments), files) as honest:
        sending = asyncio.ensure_future(honest.run(arguments.rate, 60 * arguments.soak))
        process = Path(f"/proc/{honest.service.process.pid}")
        while not sending.done():
            samples.append(
                {
                    "requests": honest.counts.total(),
                    "resident_mib": resident_mib(honest.service.process.pid),
                    "descriptors": len(list((process / "fd").iterdir())),
                    "threads": len(list((process / "task").iterdir())),
                }
            )
            await asyncio.sleep(2)
        await sending
    record.data |= {"outcomes": honest.counts, "samples": samples}
    record.save()
    settled = samples[len(samples) // 5 :]  # allocators and caches are warm
    thousands = [sample["requests"] / 1000 for sample in settled]
    rows = []
    for name in samples[0]:
        if name != "requests":
            values = [sample[name] for sample in settled]
            slope = statistics.linear_regression(thousands, values).slope
            rows.append((name, samples[-1][name], f"{slope:+.4f}"))
    print(dict(honest.counts), honest.told())
    print(table(["", "at the end", "growth per 1,000 requests"], rows))
    return int(honest.told()["faults"])


def _chosen(only: Sequence[str] | None, workers: int) -> list[str]:
    """Return the hurts to measure, and print which are skipped and why."""
    names = []
    for name in only or [*ATTACKS, *FAULTS]:
        if only is None and workers == 1 and name in _NEED_WORKERS:
            continue
        lacking = ATTACKS[name].lacking if name in ATTACKS else []
        if lacking:
            print(f"{name}: skipped: it needs {', '.join(lacking)}", file=sys.stderr)
            continue
        names.append(name)
    return names


def main() -> int:
    """Measure, print, save the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*ATTACKS, *FAULTS],
        help="(default: all that the workers allow)",
    )
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="no hurt: does anything grow?"
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rate", type=float, default=20, help="honest requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument(
        "--setting", action="append", default=[], metavar="VIT_NAME=VALUE", help="of the service"
    )
    parser.add_argument("--record", type=Path, default=RESULTS / "reliability.json")
    arguments = parser.parse_args()
    # A run that is ended stops its service.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    arguments.only = _chosen(arguments.only, arguments.workers)
    paths, origin = pictures.ensure()
    record = Record(
        arguments.record, dtype="auto", about={"pictures": origin, "rate": arguments.rate}
    )
    run = soak if arguments.soak else hurt_all
    return int(asyncio.run(run(arguments, record, [path.read_bytes() for path in paths])) > 0)


if __name__ == "__main__":
    sys.exit(main())
