"""A real service while it is hurt: `python -m benchmarks.reliability`, or `make chaos`, `make soak`.

Honest callers ask at the moments of a Poisson process, whatever is answered, and every answer is compared with what the
service said when nothing else was asked. First they are alone; then beside each fault and each attack of `HURTS`. Told
are how many were answered, the median and p99 beside those of being alone, and what must never happen: an answer that
is lost, mixed up or of a wrong status. Exit code 1 when that happened.

Beside an attack there are honest callers of another kind, too, and marks: JPEGs answered, p99 beside alone, WebP and
HEIC answered. Who attacks and who is honest have addresses of their own in 127.0.0.0/8 (Linux): a service is fair by
caller.

    python -m benchmarks.reliability --only avif-batches heic-30 --seconds 20 --workers 1
    python -m benchmarks.reliability --soak 30        # minutes without a fault: does memory grow?

The callers run on the cores of the service, as an attacker's would not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks import checkpoints, pictures
from benchmarks.record import RESULTS, Record, table
from benchmarks.servers import free_port, resident_mib

_PATIENCE = 13.0
"""Seconds: the service promises an answer within VIT_REQUEST_TIMEOUT (10 s) and a little."""
_CUT_SECONDS = 12.0
"""Until then after a kill a connection may end without an answer."""
_APART = 0.2
"""Sum of differences between the scores of two pictures from which on they are told apart."""
_CLOSE = 0.02
"""Scores depend a little on the batch."""
_ADMIN = "admin"
_FAULTS = ("cut", "no answer", "mixed up", "wrong status")
"""Outcomes that must never happen."""
_EXPECTED = {503: "503", 504: "504", 429: "429"}
_HOSTILE = "127.0.0.2"
"""Address of those who attack."""
_CLIP_LABELS = "cat,dog,car,tree,sky,house,street,apple,person,night"

_LEAST_JPEG, _LEAST_OTHERS, _LONGEST = 0.995, 0.95, 3.0
"""Marks beside an attack: JPEGs, and WebPs or HEICs, that are answered of those that are due; p99 beside alone."""

Scores = Mapping[int, float]


class Service:
    """A service of its own process group, started again where it has ended, as systemd or Docker would."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.last_kill = -_CUT_SECONDS
        self.restarts = 0
        self._log = folder / "log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("VIT_")}
        self._environment = {**clean, "VIT_PORT": str(self.port), "VIT_LOG_LEVEL": "warning", **settings}
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "service", "serve"]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, cwd=checkpoints.REPOSITORY, env=self._environment, stdout=log, stderr=log)

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

    def kill(self, pids: Sequence[int], number: signal.Signals, *, cuts: bool) -> None:
        """Signal the first of some processes; `cuts` where connections may end with it."""
        if cuts:
            self.last_kill = time.monotonic()
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(pids[0], number)

    async def until_ready(self, seconds: float = 120) -> float:
        """Wait until it is ready, start it again where it has ended, and return the seconds."""
        began = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=2) as client:
            while time.monotonic() - began < seconds:
                if self.process.poll() is not None:
                    self.restarts += 1
                    self.process = self._start()
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("/readyz")).status_code == 200:
                        return time.monotonic() - began
                await asyncio.sleep(0.05)
        raise TimeoutError(f"not ready after {seconds:g} s:\n{self._log.read_text(errors='replace')[-3000:]}")

    def stop(self) -> int:
        """End it in order, and return the exit code."""
        for pid in [*self.children(torch=True), *self.children(torch=False)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


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
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    async def run(self, rate: float, seconds: float) -> None:
        """Send for some seconds at a rate (requests a second), then wait for the answers."""
        chance, loop = random.Random(self.seed), asyncio.get_running_loop()
        moment = loop.time()
        end = moment + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2)
        async with (
            httpx.AsyncClient(base_url=self.service.url, timeout=_PATIENCE, limits=limits) as client,
            asyncio.TaskGroup() as group,
        ):
            while (moment := moment + chance.expovariate(rate)) < end:
                await asyncio.sleep(max(0.0, moment - loop.time()))
                group.create_task(self._one(client, chance.randrange(len(self.bodies)), chance.random()))

    async def _one(self, client: httpx.AsyncClient, number: int, kind: float) -> None:
        began = time.monotonic()
        try:
            outcome = await self._ask(client, number, kind)
        except httpx.ConnectError:
            outcome = "not connected"
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout, httpx.ConnectTimeout):
            outcome = "no answer"
        except httpx.TransportError:
            killed = time.monotonic() - self.service.last_kill < _CUT_SECONDS
            outcome = "cut by a kill" if killed else "cut"
        self.counts[outcome] += 1
        if outcome == "right":
            self.seconds.append(time.monotonic() - began)

    async def _ask(self, client: httpx.AsyncClient, number: int, kind: float) -> str:
        """Ask for one picture, for several, or with half a picture; a few callers leave."""
        if kind < 0.05:
            answer = await client.post("/classify", content=self.bodies[number][: len(self.bodies[number]) // 9])
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
        return any(all(abs(known.get(k, -1) - v) < _CLOSE for k, v in given.items()) for known in self.known[number])

    def told(self) -> dict[str, float]:
        """Return the share of right answers among those that were due one, and milliseconds."""
        due = sum(self.counts.values()) - self.counts["left"] - self.counts["refused"]
        cuts = [*statistics.quantiles(self.seconds, n=100)] if len(self.seconds) > 1 else [float("nan")] * 99
        faults = sum(self.counts[name] for name in _FAULTS)
        share = round(self.counts["right"] / due, 4) if due else 0.0
        return {"due": due, "answered": share, "p50": 1e3 * cuts[49], "p99": 1e3 * cuts[98], "faults": faults}


@dataclass
class Others:
    """Honest callers of another kind, or the many phones of an attack; their answers are counted, and not compared.

    Attributes:
        ask: sends the request of a number.
        address: that they have.
        rate: requests a second.
        least: the mark of what is answered of all; 0: there is none.
        counts: by status, or by the error where there was no answer.
    """

    ask: Callable[[httpx.AsyncClient, int], Awaitable[httpx.Response]]
    address: str
    rate: float
    least: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def due(self) -> int:
        """Return how many requests there were."""
        return self.counts.total()

    @property
    def answered(self) -> int:
        """Return how many were answered with 200."""
        return self.counts["200"]

    async def run(self, service: Service, seconds: float) -> None:
        """Send for some seconds at the moments of a Poisson process, then wait for the answers."""
        chance, loop = random.Random(self.address), asyncio.get_running_loop()
        moment = loop.time()
        end = moment + seconds
        async with _client(service, self.address) as client, asyncio.TaskGroup() as group:
            for number in itertools.count():
                moment += chance.expovariate(self.rate)
                if moment >= end:
                    return
                await asyncio.sleep(max(0.0, moment - loop.time()))
                group.create_task(self._one(client, number))

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        try:
            self.counts[str((await self.ask(client, number)).status_code)] += 1
        except httpx.HTTPError as error:
            self.counts[type(error).__name__] += 1


def _client(service: Service, address: str) -> httpx.AsyncClient:
    """Return a client of an address of its own."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=2)
    transport = httpx.AsyncHTTPTransport(local_address=address, limits=limits)
    return httpx.AsyncClient(base_url=service.url, timeout=_PATIENCE, transport=transport)


def _of_status(answer: httpx.Response) -> str:
    outcome = _EXPECTED.get(answer.status_code, "wrong status")
    if outcome in _FAULTS:
        print(f"wrong status: {answer.status_code} {answer.text[:200]}", file=sys.stderr, flush=True)
    return outcome


def _scores(document: Mapping[str, Any]) -> dict[int, float]:
    return {best["index"]: best["score"] for best in document["predictions"]}


async def learn(url: str, files: Sequence[bytes]) -> list[Scores]:
    """Return the scores of each picture, as the quiet service answers now."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        return [_scores((await client.post("/classify", content=data)).json()) for data in files]


def told_apart(files: Sequence[bytes], scores: Sequence[Scores]) -> list[int]:
    """Return the numbers of the pictures that their answers tell apart; raises `ValueError` below four."""
    found: list[int] = []
    for number, own in enumerate(scores):
        if all(sum(abs(own.get(k, 0) - scores[o].get(k, 0)) for k in {*own, *scores[o]}) >= _APART for o in found):
            found.append(number)
    if len(found) < 4:
        raise ValueError(f"the model tells only {len(found)} of {len(files)} pictures apart")
    return found


# What hurts. Each gets the service and repeats until it is cancelled.

Hurt = Callable[[Service], Awaitable[None]]


async def _repeat(callers: int, one: Callable[[httpx.AsyncClient], Awaitable[object]], service: Service) -> None:
    """Let some callers do the same again and again, whatever is answered."""

    async def caller() -> None:
        async with _client(service, _HOSTILE) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    await one(client)
                await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())


async def _raw(callers: int, pieces: Callable[[], Iterator[bytes]], service: Service, pause: float = 0.0) -> None:
    """Let some callers write the same bytes over connections of their own again and again, and read what comes."""

    async def caller() -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", service.port, local_addr=(_HOSTILE, 0))
                for piece in pieces():
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause)
                writer.close()
                await reader.read(4096)
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())


def flat(kind: str, side: int, **options: Any) -> bytes:
    """Return a square picture of one colour in a format of Pillow's."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 40)).save(buffer, kind, **options)
    return buffer.getvalue()


def heic() -> bytes:
    """Return a photo of 12 megapixels as phones take it; needs pillow-heif."""
    import pillow_heif  # noqa: PLC0415  an optional package

    pillow_heif.register_heif_opener()
    noise = np.random.default_rng(0).integers(0, 256, (189, 252, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((4032, 3024), Image.Resampling.BICUBIC).save(buffer, "HEIF", quality=60)
    return buffer.getvalue()


def _batch_of(
    data: bytes, count: int, path: str = "/classify/batch"
) -> Callable[[httpx.AsyncClient], Awaitable[object]]:
    files = [("file", ("a", data)) for _ in range(count)]
    return lambda client: client.post(path, files=files)


def _picture(data: bytes, path: str = "/classify") -> Callable[[httpx.AsyncClient], Awaitable[object]]:
    return lambda client: client.post(path, content=data)


async def avif_batches(service: Service) -> None:
    """Four callers send batches of 64 AVIFs of 8k x 8k pixels and 1.6 kB."""
    await _repeat(4, _batch_of(await asyncio.to_thread(flat, "AVIF", 7990, quality=30), 64), service)


async def avif_single(service: Service) -> None:
    """Thirty-two callers send such an AVIF each."""
    await _repeat(32, _picture(await asyncio.to_thread(flat, "AVIF", 7990, quality=30)), service)


async def tiff_batches(service: Service) -> None:
    """Four callers send batches of 64 TIFFs."""
    await _repeat(4, _batch_of(await asyncio.to_thread(flat, "TIFF", 1200, compression="tiff_lzw"), 64), service)


async def large_png(service: Service) -> None:
    """Four callers send a PNG of 49 megapixels of 16 bits, and leave after a second."""
    buffer = io.BytesIO()
    await asyncio.to_thread(Image.new("I;16", (7000, 7000)).save, buffer, "PNG")

    async def one(client: httpx.AsyncClient) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await client.post("/classify", content=buffer.getvalue())

    await _repeat(4, one, service)


async def drawings(service: Service) -> None:
    """Sixty-four callers ask for eight maps of 2048 pixels each."""
    await _repeat(64, _picture(flat("JPEG", 300), "/attention?class=0,1,2,3,4,5,6,7&size=2048&view=photo"), service)


async def texts(service: Service) -> None:
    """Sixty callers ask for a picture's best of 66 labels that nobody has asked for before."""
    picture, numbers = flat("JPEG", 300), itertools.count()

    async def one(client: httpx.AsyncClient) -> None:
        labels = ",".join(f"label {next(numbers)}" for _ in range(66))
        await client.post("/classify", content=picture, params={"labels": labels})

    await _repeat(60, one, service)


async def relevance_batches(service: Service) -> None:
    """Four callers send batches of 64 JPEGs and ask for the map of the best of two labels."""
    one = _batch_of(flat("JPEG", 300), 64, "/classify/batch?attention=relevance&labels=cat,dog")
    await _repeat(4, one, service)


async def crawlers(service: Service) -> None:
    """Three hundred callers send a byte a second of a body that never comes."""
    head = b"POST /classify HTTP/1.1\r\nHost: vitserve\r\nContent-Length: 100000\r\n\r\n"
    await _raw(300, lambda: iter([head, *[b"x"] * 6]), service, pause=1)


async def escaped_json(service: Service) -> None:
    """Four callers send JSON whose base64 is 3 MB of escaped line breaks."""
    body = b'{"image": "' + b"\\n" * 1_500_000 + b'"}'
    head = b"POST /classify HTTP/1.1\r\nHost: vitserve\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    await _raw(4, lambda: iter([head % len(body) + body]), service)


async def tiny_chunks(service: Service) -> None:
    """Four callers send bodies in chunks of one byte."""
    head = b"POST /classify HTTP/1.1\r\nHost: vitserve\r\nTransfer-Encoding: chunked\r\n\r\n"
    await _raw(4, lambda: iter([head, *[b"1\r\nx\r\n" * 10_000] * 20]), service)


async def _signals(service: Service, number: signal.Signals, who: str, every: float = 10) -> None:
    while True:
        pids = {"engine": service.children(torch=True), "worker": service.children(torch=False)}
        service.kill(pids.get(who, [service.process.pid]), number, cuts=who != "engine")
        await asyncio.sleep(1)
        await service.until_ready()
        await asyncio.sleep(every)


async def swaps(service: Service) -> None:
    """The checkpoint is loaded again, under the same name, as often as the service takes it."""
    headers = {"Authorization": f"Bearer {_ADMIN}"}
    async with httpx.AsyncClient(base_url=service.url, timeout=300, headers=headers) as client:
        name = (await client.get("/model")).json()["name"]
        for checkpoint in itertools.cycle(["other", "first"]):
            body = {"parameters": {"checkpoint": checkpoint}}
            answer = await client.post(f"/v2/repository/models/{name}/load", json=body)
            if answer.status_code not in (200, 503):
                raise RuntimeError(f"not loaded: {answer.status_code} {answer.text[:200]}")
            name = (await client.get("/model")).json()["name"]


HURTS: dict[str, Hurt] = {
    "avif-batches": avif_batches,
    "avif-single": avif_single,
    "tiff-batches": tiff_batches,
    "large-png": large_png,
    "drawings": drawings,
    "texts": texts,
    "relevance-batches": relevance_batches,
    "crawlers": crawlers,
    "escaped-json": escaped_json,
    "tiny-chunks": tiny_chunks,
    "swaps": swaps,
    "kill-engine": lambda service: _signals(service, signal.SIGKILL, "engine"),
    "kill-worker": lambda service: _signals(service, signal.SIGKILL, "worker"),
    "stop-worker": lambda service: _signals(service, signal.SIGSTOP, "worker"),
    "kill-service": lambda service: _signals(service, signal.SIGKILL, "service"),
    "terminate": lambda service: _signals(service, signal.SIGTERM, "service"),
}
"""What is done beside the honest callers."""

PHONES: dict[str, float] = {"heic-5": 5, "heic-30": 30, "heic-80": 0}
"""Photos of phones a second, instead of an attack; 0: four fifths of what the service answers at most."""

BESIDE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("avif-batches", "avif-single", "heic-5", "heic-30", "tiff-batches", "large-png"), ("webp", "heic")
    ),
    **dict.fromkeys(("crawlers", "escaped-json", "tiny-chunks"), ("webp", "heic")),
    "heic-80": (),
    "drawings": ("webp", "maps"),
    "texts": ("labels",),
    "relevance-batches": ("labels",),
}
"""The attacks, which have marks, and the other honest callers beside each."""

_NEED_CLIP = {"texts", "relevance-batches"}
_NEED_WORKERS = {"kill-engine", "kill-worker", "stop-worker"}


@asynccontextmanager
async def _hurting(hurt: Hurt | None, service: Service) -> Any:
    task = None if hurt is None else asyncio.ensure_future(hurt(service))
    await asyncio.sleep(0 if task is None else 2)  # until what it sends is made and on its way
    try:
        yield
    finally:
        if task is not None:
            if task.done():
                task.result()  # a fault of this program
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _models(folder: Path) -> Path:
    """Write two checkpoints of one architecture and other weights into a folder, for `swaps`."""
    for name, seed in (("first", 0), ("other", 1)):
        checkpoints.write(folder / name, checkpoints.VIT32, seed=seed)
    return folder / "first"


async def _others(name: str, service: Service) -> dict[str, Others]:
    """Return the honest callers of other kinds beside an attack, and those whose number is the attack."""
    photo = await asyncio.to_thread(heic) if name in PHONES or "heic" in BESIDE.get(name, ()) else b""
    small = {"webp": flat("WEBP", 600, quality=80), "jpeg": flat("JPEG", 300)}

    def with_labels(client: httpx.AsyncClient, number: int) -> Awaitable[httpx.Response]:
        return client.post("/classify", content=small["jpeg"], params={"labels": f"a cat {number},a dog {number}"})

    kinds = {
        "webp": Others(
            lambda client, _: client.post("/classify", content=small["webp"]), "127.0.0.3", 2, _LEAST_OTHERS
        ),
        "heic": Others(lambda client, _: client.post("/classify", content=photo), "127.0.0.4", 0.5, _LEAST_OTHERS),
        "maps": Others(lambda client, _: client.post("/attention", content=small["jpeg"]), "127.0.0.5", 2),
        "labels": Others(with_labels, "127.0.0.6", 2),
    }
    found = {kind: kinds[kind] for kind in BESIDE.get(name, ())}
    if name in PHONES:
        rate, least = PHONES[name], 0.0
        if not rate:
            rate, least = 0.8 * await _capacity(photo, service), 1.0
        found["phones"] = Others(kinds["heic"].ask, _HOSTILE, rate, least)
    return found


async def _capacity(photo: bytes, service: Service, seconds: float = 8) -> float:
    """Return how many of these a second the service answers to eight callers."""
    answered = 0

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal answered
        answer = await client.post("/classify", content=photo)
        answered += answer.status_code == 200

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _repeat(8, one, service)
    return answered / seconds


def missed(found: Mapping[str, float], alone_p99: float, others: Mapping[str, Others]) -> list[str]:
    """Return the marks that were missed beside an attack, each with what was found."""
    marks = []
    if found["answered"] < _LEAST_JPEG:
        marks.append(f"answered {found['answered']:.1%}")
    if not found["p99"] <= _LONGEST * alone_p99:
        marks.append(f"p99 {found['p99'] / alone_p99:.1f} x")
    marks += [
        f"{kind} {each.answered} of {each.due}"
        for kind, each in others.items()
        if each.answered < each.least * each.due
    ]
    return marks


async def hurt_all(arguments: argparse.Namespace, record: Record, files: Sequence[bytes]) -> int:
    """Measure being alone and beside each hurt, for one number of workers; return how many faults there were."""
    faults, rows = 0, list[list[object]]()
    for is_clip in (False, True):
        names = [name for name in arguments.only if (name in _NEED_CLIP) == is_clip]
        if names:
            faults += await _hurt(names, arguments, record, files, rows, is_clip=is_clip)
    header = ["", "due", "answered", "p50 ms", "p99 ms", "faults", "ready after s", "MiB", "others answered", "marks"]
    print(table(header, rows))
    return faults


async def _hurt(
    names: Sequence[str],
    arguments: argparse.Namespace,
    record: Record,
    files: Sequence[bytes],
    rows: list[list[object]],
    *,
    is_clip: bool,
) -> int:
    """Measure one service, of the small ViT or of a CLIP, and add a row for being alone and for each hurt."""
    faults, alone_p99 = 0, float("nan")
    with tempfile.TemporaryDirectory(prefix="vitserve-hurt-") as folder:
        service = Service(Path(folder), _settings(arguments, Path(folder), is_clip=is_clip))
        try:
            await service.until_ready()
            first = await learn(service.url, files)
            chosen = told_apart(files, first)
            bodies, known = [files[number] for number in chosen], [[first[number]] for number in chosen]
            for name in ["alone", *names]:
                if name == "swaps":
                    known = await _both(service, bodies, known)
                honest = Honest(service, bodies, known, arguments.seed)
                others = await _others(name, service)
                async with _hurting(HURTS.get(name), service), asyncio.TaskGroup() as group:
                    group.create_task(honest.run(arguments.rate, arguments.seconds))
                    for each in others.values():
                        group.create_task(each.run(service, arguments.seconds))
                ready = await service.until_ready()
                found = {**honest.told(), "ready_s": ready, "resident_mib": resident_mib(service.process.pid)}
                faults += int(found["faults"])
                alone_p99 = found["p99"] if name == "alone" else alone_p99
                marks = ", ".join(missed(found, alone_p99, others)) or "met" if name in BESIDE else ""
                told = {kind: f"{each.answered} of {each.due}" for kind, each in others.items()}
                rows.append(
                    [name + " (CLIP)" * is_clip, *found.values(), ", ".join(map(" ".join, told.items())), marks]
                )
                about = {"outcomes": honest.counts, "others": {kind: each.counts for kind, each in others.items()}}
                record.section(f"{arguments.workers} workers" + ", CLIP" * is_clip)[name] = (
                    found | about | {"marks": marks}
                )
                record.save()
                print(f"{name}: {dict(honest.counts)} {told} {marks}", file=sys.stderr, flush=True)
        finally:
            exit_code = service.stop()
    print(f"stopped in order at the end: exit code {exit_code}")
    return faults + (exit_code != 0)


def _settings(arguments: argparse.Namespace, folder: Path, *, is_clip: bool) -> dict[str, str]:
    """Write the checkpoints into a folder, and return the settings of the service."""
    settings = {"VIT_WORKERS": str(arguments.workers), "VIT_DRAIN_DELAY": "0", "VIT_ADMIN_KEY": _ADMIN}
    if is_clip:
        checkpoints.write_clip(folder / "clip")
        settings |= {"VIT_CHECKPOINT": str(folder / "clip"), "VIT_LABELS": _CLIP_LABELS}
    else:
        settings |= {"VIT_CHECKPOINT_FOLDER": str(folder), "VIT_CHECKPOINT": str(_models(folder))}
    return settings | dict(pair.split("=", 1) for pair in arguments.setting)


async def _both(service: Service, bodies: Sequence[bytes], known: list[list[Scores]]) -> list[list[Scores]]:
    """Return what both models say of each picture, and leave the first one served."""
    runner = asyncio.ensure_future(swaps(service))
    async with httpx.AsyncClient(base_url=service.url) as client:
        before = (await client.get("/model")).json()["source"]
        while (await client.get("/model")).json()["source"] == before:
            await asyncio.sleep(0.05)
    runner.cancel()
    await asyncio.gather(runner, return_exceptions=True)
    return [[*own, other] for own, other in zip(known, await learn(service.url, bodies), strict=True)]


async def soak(arguments: argparse.Namespace, record: Record, files: Sequence[bytes]) -> int:
    """Send mixed requests for some minutes, look at the processes, and tell what grows; return how many faults."""
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="vitserve-soak-") as name:
        settings = {"VIT_RECENT_TTL": "0", "VIT_WORKERS": str(arguments.workers)}
        service = Service(Path(name), settings | dict(pair.split("=", 1) for pair in arguments.setting))
        try:
            await service.until_ready()
            first = await learn(service.url, files)
            chosen = told_apart(files, first)
            bodies, known = [files[number] for number in chosen], [[first[number]] for number in chosen]
            honest = Honest(service, bodies, known, arguments.seed)
            sending = asyncio.ensure_future(honest.run(arguments.rate, 60 * arguments.soak))
            while not sending.done():
                pid = service.process.pid
                samples.append(
                    {
                        "requests": sum(honest.counts.values()),
                        "resident_mib": resident_mib(pid),
                        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
                    }
                )
                await asyncio.sleep(2)
            await sending
        finally:
            exit_code = service.stop()
    record.data |= {"outcomes": honest.counts, "samples": samples, "exit_code": exit_code}
    record.save()
    settled = samples[len(samples) // 5 :]  # allocators and caches are warm
    x = [sample["requests"] / 1000 for sample in settled]
    slopes = {n: statistics.linear_regression(x, [s[n] for s in settled]).slope for n in samples[0] if n != "requests"}
    print(dict(honest.counts), honest.told())
    rows = [(name, samples[-1][name], f"{slope:+.4f}") for name, slope in slopes.items()]
    print(table(["", "at the end", "growth per 1,000 requests"], rows))
    return int(honest.told()["faults"]) + (exit_code != 0)


def main() -> int:
    """Measure, print, save the record."""
    arguments = _arguments()
    paths, origin = pictures.ensure()
    record = Record(arguments.record, dtype="auto", about={"pictures": origin, "rate": arguments.rate})
    run = soak if arguments.soak else hurt_all
    return int(asyncio.run(run(arguments, record, [path.read_bytes() for path in paths])) > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[*PHONES, *HURTS], help="(default: all that the workers allow)")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="no hurt: does anything grow?")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rate", type=float, default=20, help="honest requests a second")
    parser.add_argument("--seconds", type=float, default=20, help="of each measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--setting", action="append", default=[], metavar="VIT_NAME=VALUE", help="of the service")
    parser.add_argument("--record", type=Path, default=RESULTS / "reliability.json")
    arguments = parser.parse_args()
    if arguments.only is None:
        arguments.only = [name for name in [*PHONES, *HURTS] if arguments.workers > 1 or name not in _NEED_WORKERS]
    return arguments


if __name__ == "__main__":
    sys.exit(main())
