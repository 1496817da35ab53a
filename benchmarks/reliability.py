"""A real service while it is hurt: `python -m benchmarks.reliability`, or `make chaos`, `make
soak`.

Honest callers ask at the moments of a Poisson process, whatever is answered, and every answer is
compared with what the service said when nothing else was asked. First nothing hurts the service;
then each attack of `benchmarks.attacks` and each fault of `FAULTS` does. Told are how many were
answered, the median and p99, and what must never happen: an answer that is lost, mixed up or of a
wrong status. Exit code 1 when that happened.

Beside an attack there are honest callers of other kinds, too, and marks: JPEGs answered, p99 beside
that of the same callers without an attack, WebP and HEIC answered. Each kind has an address of its
own in 127.0.0.0/8 (Linux): a service is fair by caller.

    python -m benchmarks.reliability --only avif-batches heic-30 --seconds 20 --workers 1
    python -m benchmarks.reliability --soak 30        # minutes without a fault: does memory grow?

All callers run on the cores of the service, as an attacker's would not, but the hostile in a
process of their own.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
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

from benchmarks import checkpoints, pictures
from benchmarks.attacks import (
    ATTACKS,
    KEY,
    MODEL,
    OTHERS,
    Callers,
    attack,
    attacked,
    client_of,
    grpc_port,
)
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import VITSERVE, Running, resident_mib

# Until then after a kill a connection may end without an answer.
_CUT_SECONDS = 12.0
# Sum of differences between the scores of two pictures from which on they are told apart.
_APART = 0.2
# Such a sum up to which an answer is a picture's: scores depend a little on the batch and on what
# else it computes.
_CLOSE = _APART / 2
_ADMIN = "admin"
# Outcomes that must never happen.
_FAULTS = ("cut", "no answer", "mixed up", "wrong status")
# Marks beside an attack: JPEGs that are answered of those that are due; p99 beside that without
# one. The service refuses such requests unread, so they hurt nobody and prove nothing.
_WRONG_HOST = "421"
_LEAST_JPEG, _LONGEST = 0.995, 3.0
# Seconds of a hurt before honest callers come.
_HEAD_START = 2.0

Scores = Mapping[int, float]


class Service(Running):
    """A service that is started again where it has ended, as systemd or Docker would."""

    last_kill = -_CUT_SECONDS

    def children(self, *, torch: bool) -> list[int]:
        """Return the engine processes (with torch or OpenVINO in their memory), or the web workers."""
        found = []
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for pid in map(int, path.read_text().split()):
                maps = Path(f"/proc/{pid}/maps").read_text()
                if ("libtorch" in maps or "libopenvino" in maps) == torch:
                    found.append(pid)
        return found

    async def until_ready(self, seconds: float = 300) -> float:
        """Wait until it is ready, start it again where it has ended, and return the seconds."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=2) as client:
            while time.monotonic() - began < seconds:
                if self.process.poll() is not None:
                    self.launch()
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/readyz")).status_code == 200:
                        return time.monotonic() - began
                await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready after {seconds:g} s:\n{self.log_end()}")


@dataclass
class Honest:
    """Callers who mean well, and what became of their requests.

    Attributes:
        bodies: pictures whose answers tell them apart.
        known: by picture the scores that the quiet service gave, by each model that may answer.
        counts: outcomes; those of `_FAULTS` must never happen.
        seconds: of each right answer.
    """

    service: Service
    bodies: Sequence[bytes]
    known: list[list[Scores]]
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    async def run(self, rate: float, seconds: float) -> None:
        """Send for some seconds at a rate (requests a second), then wait for the answers."""
        await Callers(self._one, "127.0.0.1", rate, counts=self.counts).run(
            self.service.url, seconds
        )

    async def _one(self, client: httpx.AsyncClient, number: int) -> str:
        began, chance = time.monotonic(), random.Random(number)
        try:
            outcome = await self._ask(client, chance.randrange(len(self.bodies)), chance.random())
        except httpx.ConnectError:
            return "not connected"
        except httpx.TimeoutException:
            return "no answer"
        except httpx.TransportError:
            killed = time.monotonic() - self.service.last_kill < _CUT_SECONDS
            return "cut by a kill" if killed else "cut"
        if outcome == "right":
            self.seconds.append(time.monotonic() - began)
        return outcome

    async def _ask(self, client: httpx.AsyncClient, number: int, kind: float) -> str:
        """Ask for one picture, for several, or with half a picture; a few callers leave."""
        if kind < 0.05:
            answer = await client.post(
                "/classify", content=self.bodies[number][: len(self.bodies[number]) // 9]
            )
            return "refused" if answer.status_code == 422 else _of_status(answer)
        if kind < 0.1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.post("/classify", content=self.bodies[number])
            return "left"
        if kind < 0.15:
            chosen = [number, (number + 1) % len(self.bodies)]
            files = [("file", ("a.jpg", self.bodies[each])) for each in chosen]
            answer = await client.post("/classify/batch", files=files)
            documents = answer.json()["results"] if answer.status_code == 200 else []
            if any("error" in document for document in documents):
                return "503"
        else:
            chosen, query = [number], {"attention": "true"} if kind < 0.25 else {}
            answer = await client.post("/classify", content=self.bodies[number], params=query)
            documents = [answer.json()]
        if answer.status_code != 200:
            return _of_status(answer)
        return "right" if all(map(self._fits, chosen, documents)) else "mixed up"

    def _fits(self, number: int, document: Mapping[str, Any]) -> bool:
        """Whether an answer is this picture's, and wholly of one model."""
        given = _scores(document)
        return any(
            sum(abs(known.get(k, 0) - v) for k, v in given.items()) < _CLOSE
            for known in self.known[number]
        )

    def told(self) -> dict[str, float]:
        """Return the share of right answers among those that were due one, and milliseconds."""
        due = sum(self.counts.values()) - self.counts["left"] - self.counts["refused"]
        cuts = (
            [*statistics.quantiles(self.seconds, n=100)]
            if len(self.seconds) > 1
            else [float("nan")] * 99
        )
        faults = sum(self.counts[name] for name in _FAULTS)
        share = round(self.counts["right"] / due, 4) if due else 0.0
        return {
            "due": due,
            "answered": share,
            "p50": 1e3 * cuts[49],
            "p99": 1e3 * cuts[98],
            "faults": faults,
        }


def _of_status(answer: httpx.Response) -> str:
    if answer.status_code in (429, 503, 504):
        return str(answer.status_code)
    print(f"wrong status: {answer.status_code} {answer.text[:200]}", file=sys.stderr, flush=True)
    return "wrong status"


def _scores(document: Mapping[str, Any]) -> dict[int, float]:
    return {best["index"]: best["score"] for best in document["predictions"]}


async def learn(url: str, files: Sequence[bytes]) -> list[Scores]:
    """Return the scores of the ten best classes of each picture, as the quiet service answers now."""
    async with client_of(url, "127.0.0.1") as client:
        answers = [await client.post("/classify?top_k=10", content=data) for data in files]
        return [_scores(answer.json()) for answer in answers]


def told_apart(files: Sequence[bytes], scores: Sequence[Scores]) -> list[int]:
    """Return the numbers of the pictures that their answers tell apart; raises `ValueError` below
    four.
    """
    found: list[int] = []
    for number, own in enumerate(scores):
        if all(
            sum(abs(own.get(k, 0) - scores[o].get(k, 0)) for k in {*own, *scores[o]}) >= _APART
            for o in found
        ):
            found.append(number)
    if len(found) < 4:
        raise ValueError(f"the model tells only {len(found)} of {len(files)} pictures apart")
    return found


@asynccontextmanager
async def _serving(settings: Mapping[str, str], files: Sequence[bytes]) -> AsyncIterator[Honest]:
    """Start a service, yield honest callers who know its answers, stop it; raises `RuntimeError` if
    it ends badly.
    """
    service = Service(VITSERVE, settings)
    try:
        await service.until_ready()
        scores = await learn(service.url, files)
        chosen = told_apart(files, scores)
        yield Honest(
            service, [files[number] for number in chosen], [[scores[number]] for number in chosen]
        )
    finally:
        exit_code = service.stop()
    print(f"stopped in order at the end: exit code {exit_code}")
    if exit_code:
        raise RuntimeError(f"the service ended with {exit_code}")


# Faults. Each gets the service and repeats until it is cancelled.


async def _signals(number: signal.Signals, who: str, service: Service) -> None:
    while True:
        await asyncio.sleep(7)  # so that requests are under way
        pids = {"engine": service.children(torch=True), "worker": service.children(torch=False)}
        if who != "engine":  # connections may end with it
            service.last_kill = time.monotonic()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pids.get(who, [service.process.pid])[0], number)
        await asyncio.sleep(1)
        await service.until_ready()


async def _load(service: Service, checkpoint: str) -> None:
    headers, body = (
        {"Authorization": f"Bearer {_ADMIN}"},
        {"parameters": {"checkpoint": checkpoint}},
    )
    async with httpx.AsyncClient(base_url=service.url, timeout=300, headers=headers) as client:
        answer = await client.post(f"/v2/repository/models/{MODEL}/load", json=body)
    if answer.status_code not in (200, 503):
        raise RuntimeError(f"not loaded: {answer.status_code} {answer.text[:200]}")


async def swaps(service: Service) -> None:
    """The checkpoint is loaded again, under the same name, as often as the service takes it."""
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
"""What happens beside the honest callers."""

_NEED_WORKERS = {"kill-engine", "kill-worker", "stop-worker"}


async def _beside(
    name: str, kinds: Sequence[str], honest: Honest, rate: float, seconds: float
) -> dict[str, Callers]:
    """Let honest callers, these kinds of others too, ask beside a hurt; return all other callers."""
    url = honest.service.url
    found = {kind: await asyncio.to_thread(OTHERS[kind]) for kind in kinds}
    hurt: Coroutine[Any, Any, Callers | None]
    if name in ATTACKS:
        hurt = attacked(await attack(name, url, seconds + _HEAD_START))
    else:
        hurt = FAULTS[name](honest.service) if name in FAULTS else asyncio.sleep(0)
    hurting = asyncio.create_task(hurt)
    async with asyncio.TaskGroup() as group:
        for each in found.values():
            group.create_task(each.run(url, seconds + _HEAD_START))
        await asyncio.sleep(_HEAD_START)
        await honest.run(rate, seconds)
        if hurting.done():
            hurting.result()  # a fault of this program
        if name in FAULTS:
            hurting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        attackers = await hurting
        found |= {} if attackers is None else {"attackers": attackers}
    return found


def missed(
    found: Mapping[str, float], quiet_p99: float, others: Mapping[str, Callers]
) -> list[str]:
    """Return the marks that were missed beside an attack, each with what was found."""
    marks = []
    if found["answered"] < _LEAST_JPEG:
        marks.append(f"answered {found['answered']:.1%}")
    if not found["p99"] <= _LONGEST * quiet_p99:
        marks.append(f"p99 {found['p99'] / quiet_p99:.1f} x")
    if "attackers" in others and others["attackers"].counts[_WRONG_HOST]:
        marks.append("the attack was refused for its Host header")
    return marks + [
        f"{kind} {each}"
        for kind, each in others.items()
        if each.counts["200"] < each.least * each.counts.total()
    ]


async def _hurt(
    kind: str, arguments: argparse.Namespace, record: Record, files: Sequence[bytes]
) -> int:
    """Measure one kind of service without and beside each hurt, print the table, and return the
    number of faults.
    """
    names = [
        name
        for name in arguments.only
        if (ATTACKS[name].service if name in ATTACKS else "vit") == kind
    ]
    if not names:
        return 0
    faults, rows, quiet_p99 = 0, [], dict[Sequence[str], float]()
    runs: dict[str, Sequence[str]] = {}
    for name in names:
        others_of = ATTACKS[name].beside if name in ATTACKS else ()
        runs |= {", ".join(["honest", *others_of]): others_of, name: others_of}
    with tempfile.TemporaryDirectory(prefix="vitserve-hurt-") as folder:
        async with _serving(_settings(kind, Path(folder), arguments), files) as quiet:
            for name, kinds in runs.items():
                if name == "swaps":
                    await _load(quiet.service, "other")
                    both = zip(
                        quiet.known, await learn(quiet.service.url, quiet.bodies), strict=True
                    )
                    quiet.known = [[*own, other] for own, other in both]
                honest = replace(quiet, counts=Counter(), seconds=[])
                others = await _beside(name, kinds, honest, arguments.rate, arguments.seconds)
                ready = await honest.service.until_ready()
                found: dict[str, Any] = honest.told() | {
                    "ready_s": ready,
                    "resident_mib": resident_mib(honest.service.process.pid),
                }
                faults += int(found["faults"])
                quiet_p99.setdefault(kinds, found["p99"])
                marks = (
                    ", ".join(missed(found, quiet_p99[kinds], others)) or "met"
                    if name in ATTACKS
                    else ""
                )
                told = ", ".join(f"{other} {each}" for other, each in others.items())
                rows.append([name, *found.values(), told, marks])
                counts = {"honest": honest.counts} | {
                    other: each.counts for other, each in others.items()
                }
                found |= {"counts": counts, "marks": marks}
                record.section(f"{arguments.workers} workers, {kind}")[name] = found
                record.save()
                print(f"{name}: {counts} {marks}", file=sys.stderr, flush=True)
    header = [
        "due",
        "answered",
        "p50 ms",
        "p99 ms",
        "faults",
        "ready after s",
        "MiB",
        "answered of others",
        "marks",
    ]
    print(table([kind, *header], rows))
    return faults


async def hurt_all(arguments: argparse.Namespace, record: Record, files: Sequence[bytes]) -> int:
    """Measure each kind of service, for one number of workers; return how many faults there were."""
    return sum(
        [await _hurt(kind, arguments, record, files) for kind in ("vit", "keys", "models", "clip")]
    )


def _settings(kind: str, folder: Path, arguments: argparse.Namespace) -> dict[str, str]:
    """Write checkpoints of one architecture and other weights into a folder; return the settings of
    a service.
    """
    first = folder / "models" / "first"
    if kind == "clip":
        checkpoints.write_clip(first)
    else:
        for name, seed in (("first", 0), ("other", 1)):
            checkpoints.write(folder / "models" / name, checkpoints.VIT32, seed=seed)
    of_kind = {
        "vit": {"VIT_ADMIN_KEY": _ADMIN, "VIT_CHECKPOINT_FOLDER": str(first.parent)},
        "keys": {"VIT_API_KEYS": KEY},
        "models": {"VIT_MODELS": str(first.parent), "VIT_CHECKPOINT": ""},
        "clip": {"VIT_LABELS": "cat,dog,car,tree,sky,house,street,apple,person,night"},
    }
    settings = {
        "VIT_WORKERS": str(arguments.workers),
        "VIT_DRAIN_DELAY": "0",
        "VIT_GRPC_PORT": str(grpc_port()),
    }
    settings |= {} if kind == "models" else {"VIT_CHECKPOINT": str(first), "VIT_MODEL_NAME": MODEL}
    return settings | of_kind[kind] | dict(pair.split("=", 1) for pair in arguments.setting)


async def soak(arguments: argparse.Namespace, record: Record, files: Sequence[bytes]) -> int:
    """Send mixed requests for some minutes, look at the processes, and tell what grows; return how
    many faults.
    """
    samples: list[dict[str, float]] = []
    settings = {"VIT_RECENT_TTL": "0", "VIT_WORKERS": str(arguments.workers)}
    settings |= dict(pair.split("=", 1) for pair in arguments.setting)
    async with _serving(settings, files) as honest:
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
    x = [sample["requests"] / 1000 for sample in settled]
    slopes = {
        n: statistics.linear_regression(x, [s[n] for s in settled]).slope
        for n in samples[0]
        if n != "requests"
    }
    print(dict(honest.counts), honest.told())
    rows = [(name, samples[-1][name], f"{slope:+.4f}") for name, slope in slopes.items()]
    print(table(["", "at the end", "growth per 1,000 requests"], rows))
    return int(honest.told()["faults"])


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
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("ended")
    )  # a run that is ended stops its service
    if arguments.only is None:
        arguments.only = [
            name
            for name in [*ATTACKS, *FAULTS]
            if arguments.workers > 1 or name not in _NEED_WORKERS
        ]
    paths, origin = pictures.ensure()
    record = Record(
        arguments.record, dtype="auto", about={"pictures": origin, "rate": arguments.rate}
    )
    run = soak if arguments.soak else hurt_all
    return int(asyncio.run(run(arguments, record, [path.read_bytes() for path in paths])) > 0)


if __name__ == "__main__":
    sys.exit(main())
