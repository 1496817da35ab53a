"""Honest callers of `benchmarks.reliability`, who compare each answer with the quiet service's."""

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.attack_requests import Callers, client_of
from benchmarks.attacked_services import CUT_SECONDS, Service

_ADDRESS = "127.0.0.1"
# Sum of differences between the scores of two pictures that tells them apart.
_APART = 0.2
# Largest such sum for the same picture: scores depend a little on the batch.
_CLOSE = _APART / 2
# Outcomes that must never happen.
_FAULTS = ("cut", "no answer", "mixed up", "wrong status")

Scores = Mapping[int, float]


@dataclass
class Honest:
    """Honest callers, and the outcomes of their requests.

    Attributes:
        bodies: pictures whose answers tell them apart.
        known: for each picture, the quiet service's scores by each model that may answer.
        counts: requests by outcome; the outcomes in `_FAULTS` must never happen.
        seconds: time of each right answer.
    """

    service: Service
    bodies: Sequence[bytes]
    known: list[list[Scores]]
    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)

    async def run(self, rate: float, seconds: float) -> None:
        """Send for some seconds at a rate (requests a second), then wait for the answers."""
        callers = Callers(self._one, _ADDRESS, rate, counts=self.counts)
        await callers.run(self.service.url, seconds)

    async def _one(self, client: httpx.AsyncClient, number: int) -> str:
        began = time.monotonic()
        chance = random.Random(number)
        try:
            outcome = await self._ask(client, chance.randrange(len(self.bodies)), chance.random())
        except httpx.ConnectError:
            return "not connected"
        except httpx.TimeoutException:
            return "no answer"
        except httpx.TransportError:
            was_killed = time.monotonic() - self.service.last_kill < CUT_SECONDS
            return "cut by a kill" if was_killed else "cut"
        if outcome == "right":
            self.seconds.append(time.monotonic() - began)
        return outcome

    async def _ask(self, client: httpx.AsyncClient, number: int, kind: float) -> str:
        """Send one picture, several, or a part of one; a few callers leave."""
        body = self.bodies[number]
        if kind < 0.05:
            answer = await client.post("/classify", content=body[: len(body) // 9])
            return "refused" if answer.status_code == 422 else _of_status(answer)
        if kind < 0.1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await client.post("/classify", content=body)
            return "left"
        if kind < 0.15:
            return await self._ask_for_two(client, number)
        query = {"attention": "true"} if kind < 0.25 else {}
        answer = await client.post("/classify", content=body, params=query)
        if answer.status_code != 200:
            return _of_status(answer)
        return "right" if self.fits(number, answer.json()) else "mixed up"

    async def _ask_for_two(self, client: httpx.AsyncClient, number: int) -> str:
        numbers = [number, (number + 1) % len(self.bodies)]
        files = [("file", ("a.jpg", self.bodies[index])) for index in numbers]
        answer = await client.post("/classify/batch", files=files)
        if answer.status_code != 200:
            return _of_status(answer)
        documents = answer.json()["results"]
        if any("error" in document for document in documents):
            return "503"
        return "right" if all(map(self.fits, numbers, documents)) else "mixed up"

    def fits(self, number: int, document: Mapping[str, Any]) -> bool:
        """Return whether an answer is this picture's, and of one model only."""
        scores = _scores(document)
        return any(
            sum(abs(known.get(index, 0) - score) for index, score in scores.items()) < _CLOSE
            for known in self.known[number]
        )

    def told(self) -> dict[str, float]:
        """Return the share of right answers among the due ones, and milliseconds."""
        due = self.counts.total() - self.counts["left"] - self.counts["refused"]
        cuts = [float("nan")] * 99
        if len(self.seconds) > 1:
            cuts = statistics.quantiles(self.seconds, n=100)
        return {
            "due": due,
            "answered": round(self.counts["right"] / due, 4) if due else 0.0,
            "p50": 1e3 * cuts[49],
            "p99": 1e3 * cuts[98],
            "faults": sum(self.counts[name] for name in _FAULTS),
        }


def _of_status(answer: httpx.Response) -> str:
    if answer.status_code in (429, 503, 504):
        return str(answer.status_code)
    print(f"wrong status: {answer.status_code} {answer.text[:200]}", file=sys.stderr, flush=True)
    return "wrong status"


def _scores(document: Mapping[str, Any]) -> dict[int, float]:
    return {best["index"]: best["score"] for best in document["predictions"]}


async def learn(url: str, files: Sequence[bytes]) -> list[Scores]:
    """Return the scores of the ten best classes of each picture by the quiet service."""
    async with client_of(url, _ADDRESS) as client:
        answers = [await client.post("/classify?top_k=10", content=data) for data in files]
        return [_scores(answer.json()) for answer in answers]


def told_apart(files: Sequence[bytes], scores: Sequence[Scores]) -> list[int]:
    """Return the numbers of the pictures that their answers tell apart.

    Raises:
        ValueError: there are fewer than four.
    """
    numbers: list[int] = []
    for number, candidate in enumerate(scores):
        if all(_difference(candidate, scores[other]) >= _APART for other in numbers):
            numbers.append(number)
    if len(numbers) < 4:
        raise ValueError(f"the model tells only {len(numbers)} of {len(files)} pictures apart")
    return numbers


def _difference(scores: Scores, others: Scores) -> float:
    return sum(abs(scores.get(index, 0) - others.get(index, 0)) for index in {*scores, *others})
