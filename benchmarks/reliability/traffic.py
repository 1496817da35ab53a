"""Mixed traffic at a fixed pace, every answer of which is checked against what the service said when it was quiet.

Requests leave at the moments of a Poisson process from a seed, whatever the service does (an open loop).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from benchmarks.reliability.http_caller import Cut, HttpCaller, NoAnswer, NotConnected

_APART = 0.2
"""Sum of differences between the scores of two pictures from which on they are told apart."""
_BOUNDARY = "vitserve-traffic"
_KEPT_IDS = 64


class Kind(StrEnum):
    """What is sent."""

    CLASSIFY = "classify"
    WITH_MAP = "classify with attention"
    BATCH = "classify/batch"
    MAP = "attention"
    BAD = "damaged picture"
    LEAVE = "caller leaves"


class Outcome(StrEnum):
    """How it ended."""

    RIGHT = "right answer"
    REFUSED = "refused as it should be (4xx)"
    BUSY = "503"
    LATE = "504"
    LEFT = "caller left"
    NOT_CONNECTED = "nobody listened"
    CUT_BY_KILL = "cut by a killed process"
    CUT = "lost: cut"
    NO_ANSWER = "lost: no answer"
    MIXED_UP = "mixed up"
    WRONG_STATUS = "wrong status"


FAULTS = (Outcome.CUT, Outcome.NO_ANSWER, Outcome.MIXED_UP, Outcome.WRONG_STATUS)
"""What must never happen."""

MIX: Mapping[Kind, float] = {
    Kind.CLASSIFY: 0.55,
    Kind.WITH_MAP: 0.1,
    Kind.BATCH: 0.05,
    Kind.MAP: 0.05,
    Kind.BAD: 0.05,
    Kind.LEAVE: 0.2,
}
"""Shares of the traffic."""


@dataclass(frozen=True)
class Picture:
    """A picture and the scores that the quiet service answered, by class."""

    data: bytes
    scores: Mapping[int, float]

    def distance(self, scores: Mapping[int, float]) -> float:
        """Return the sum of the differences to other scores."""
        classes = {*self.scores, *scores}
        return sum(abs(self.scores.get(index, 0.0) - scores.get(index, 0.0)) for index in classes)


class Traffic:
    """Sends the mix and counts the outcomes.

    Args:
        pictures: that the service tells apart; see `learn`.
        patience: seconds after which a request counts as not answered.
        killed: whether a process that may have held connections was killed just now.
    """

    def __init__(
        self,
        caller: HttpCaller,
        pictures: Sequence[Picture],
        *,
        seed: int,
        mix: Mapping[Kind, float] = MIX,
        killed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.counts: Counter[tuple[Kind, Outcome]] = Counter()
        self.notes: list[str] = []
        self.right_moments: list[float] = []
        self.latencies: list[float] = []
        self._caller = caller
        self._pictures = pictures
        self._mix = mix
        self._killed = killed
        self._random = random.Random(seed)
        self._ids: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def faults(self) -> int:
        """How many outcomes must never happen."""
        return sum(number for (_, outcome), number in self.counts.items() if outcome in FAULTS)

    async def run(self, rate: float, seconds: float) -> None:
        """Send for some seconds at a rate (requests a second), then wait for the answers."""
        loop = asyncio.get_running_loop()
        moment = loop.time()
        end = moment + seconds
        while (moment := moment + self._random.expovariate(rate)) < end:
            await asyncio.sleep(max(0.0, moment - loop.time()))
            kind = self._random.choices(list(self._mix), list(self._mix.values()))[0]
            task = asyncio.create_task(self._one(kind))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        await asyncio.gather(*self._tasks)
        self._caller.close()

    async def _one(self, kind: Kind) -> None:
        began = time.monotonic()
        try:
            outcome = await self._send(kind)
        except NotConnected:
            outcome = Outcome.NOT_CONNECTED
        except Cut:
            outcome = Outcome.CUT_BY_KILL if self._killed() else Outcome.CUT
        except NoAnswer:
            outcome = Outcome.NO_ANSWER
        self.counts[kind, outcome] += 1
        if outcome is Outcome.RIGHT:
            self.right_moments.append(time.monotonic())
            if kind is Kind.CLASSIFY:
                self.latencies.append(time.monotonic() - began)
        elif outcome in FAULTS:
            self.notes.append(f"{kind}: {outcome} after {time.monotonic() - began:.2f} s")

    async def _send(self, kind: Kind) -> Outcome:
        match kind:
            case Kind.MAP if self._ids:
                answer = await self._caller.ask(get(f"/attention?id={self._random.choice(self._ids)}&layer=-3"))
                return Outcome.RIGHT if answer.status == 200 else self._status(answer.status, 404)
            case Kind.BATCH:
                return await self._batch()
            case Kind.BAD:
                answer = await self._caller.ask(post("/classify", self._damaged()))
                return self._status(answer.status, 400, 413, 415, 422)
            case Kind.LEAVE:
                request = post("/classify", self._random.choice(self._pictures).data)
                whole = self._random.random() < 0.5
                cut = len(request) if whole else self._random.randrange(1, len(request))
                await self._caller.leave(request[:cut], self._random.uniform(0, 0.1))
                return Outcome.LEFT
            case _:
                return await self._classify(with_map=kind is Kind.WITH_MAP)

    async def _classify(self, *, with_map: bool) -> Outcome:
        picture = self._random.choice(self._pictures)
        answer = await self._caller.ask(post(f"/classify?attention={str(with_map).lower()}", picture.data))
        if answer.status != 200:
            return self._status(answer.status)
        document = json.loads(answer.body)
        if not self._fits(picture, document) or with_map != bool(document.get("attention")):
            return Outcome.MIXED_UP
        if document.get("id"):
            self._ids = [*self._ids[-_KEPT_IDS + 1 :], document["id"]]
        return Outcome.RIGHT

    async def _batch(self) -> Outcome:
        pictures = self._random.choices(self._pictures, k=self._random.randint(2, 4))
        answer = await self._caller.ask(form("/classify/batch", [picture.data for picture in pictures]))
        if answer.status != 200:
            return self._status(answer.status)
        results = json.loads(answer.body)["results"]
        if len(results) != len(pictures):
            return Outcome.MIXED_UP
        worst = Outcome.RIGHT
        for picture, result in zip(pictures, results, strict=True):
            if "error" in result:
                worst = self._status(result["error"]["status"])
            elif not self._fits(picture, result):
                return Outcome.MIXED_UP
        return worst

    def _fits(self, picture: Picture, answer: Mapping[str, Any]) -> bool:
        """Whether an answer is this picture's: scores depend a little on the batch, but no other picture is closer."""
        scores = _scores(answer)
        return min(self._pictures, key=lambda other: other.distance(scores)) is picture

    def _status(self, status: int, *expected: int) -> Outcome:
        if status in expected:
            return Outcome.REFUSED
        if status == 503:
            return Outcome.BUSY
        if status == 504:
            return Outcome.LATE
        self.notes.append(f"status {status}")
        return Outcome.WRONG_STATUS

    def _damaged(self) -> bytes:
        data = self._random.choice(self._pictures).data
        if self._random.random() < 0.5:
            return self._random.randbytes(len(data) // 4)
        return data[: self._random.randrange(2, 200)]


async def learn(caller: HttpCaller, files: Sequence[bytes]) -> list[Picture]:
    """Return the pictures whose answers tell them apart, as the quiet service answers now.

    Raises:
        ValueError: fewer than four of them can be told apart.
    """
    found: list[Picture] = []
    for data in files:
        answer = await caller.ask(post("/classify", data))
        picture = Picture(data, _scores(json.loads(answer.body)))
        if all(other.distance(picture.scores) >= _APART for other in found):
            found.append(picture)
    if len(found) < 4:
        raise ValueError(f"the model tells only {len(found)} of {len(files)} pictures apart")
    return found


async def capacity(caller: HttpCaller, pictures: Sequence[Picture], seconds: float, connections: int = 32) -> float:
    """Return the requests per second that are answered 200 in a closed loop."""
    end = time.monotonic() + seconds
    answered = 0

    async def one(index: int) -> None:
        nonlocal answered
        while time.monotonic() < end:
            index += 1
            answer = await caller.ask(post("/classify", pictures[index % len(pictures)].data))
            answered += answer.status == 200

    await asyncio.gather(*(one(index) for index in range(connections)))
    return answered / seconds


def _scores(answer: Mapping[str, Any]) -> dict[int, float]:
    return {best["index"]: best["score"] for best in answer["predictions"]}


def crawling_head() -> bytes:
    """Return the head of an upload that never comes."""
    return b"POST /classify HTTP/1.1\r\nHost: vitserve\r\nContent-Type: image/jpeg\r\nContent-Length: 100000\r\n\r\n"


def get(path: str) -> bytes:
    """Return a whole GET request."""
    return f"GET {path} HTTP/1.1\r\nHost: vitserve\r\n\r\n".encode()


def post(path: str, body: bytes, content_type: str = "image/jpeg") -> bytes:
    """Return a whole POST request."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: vitserve\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def form(path: str, files: Sequence[bytes]) -> bytes:
    """Return a whole POST request of a form with several files."""
    part = f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jpg"\r\n\r\n'.encode()
    body = b"".join(part + data + b"\r\n" for data in files) + f"--{_BOUNDARY}--\r\n".encode()
    return post(path, body, f"multipart/form-data; boundary={_BOUNDARY}")
