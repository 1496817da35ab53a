"""The checkpoint is swapped under load: `python -m benchmarks.reliability.swaps`, or `make swaps`.

Two models of different labels, input sizes and preprocessing take turns while callers ask without a pause, first with
one process, then with two web workers. Every answer is compared with what both models said when the service was quiet:
it must be wholly of one of them. One table tells what became of every request. Exit code 1 when one was mixed up or
failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, pictures
from benchmarks.checkpoints import REPOSITORY, Shape
from benchmarks.memory import whole
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability.http_caller import Cut, HttpCaller, NoAnswer, NotConnected
from benchmarks.reliability.service_process import ServiceProcess
from benchmarks.reliability.traffic import form, get, post

_PATIENCE = 30.0
_LOAD_PATIENCE = 300.0
_KEY = "admin"
_TOLERANCE = 0.02
"""Scores depend a little on the batch."""
_CONFIGURATIONS: dict[str, dict[str, str]] = {"one process": {}, "two workers": {"VIT_WORKERS": "2"}}
_OTHER = Shape("other", 48, 8, 128, 4, 2, 7, None, 2, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))

Document = Mapping[str, Any]


@dataclass
class Model:
    """One of the two models, and its answer to each picture when nothing else was asked."""

    name: str
    folder: Path
    answers: list[dict[str, float]]
    grid: list[int]

    def gave(self, document: Document, picture: int) -> bool:
        """Whether an answer to a picture is wholly this model's."""
        expected = self.answers[picture]
        scores = {f"{each['index']}:{each['label']}": each["score"] for each in document["predictions"]}
        close = all(abs(expected.get(key, -1) - score) < _TOLERANCE for key, score in scores.items())
        attention = document.get("attention")
        return document["model"] == self.name and close and (attention is None or attention["grid"] == self.grid)


class Callers:
    """Ask until told to stop, and check every answer."""

    def __init__(self, port: int, models: Sequence[Model], files: Sequence[bytes]) -> None:
        self.counts: Counter[str] = Counter()
        self.latencies: list[tuple[float, float]] = []
        self.notes: list[str] = []
        self.sent = 0
        self._caller = HttpCaller("127.0.0.1", port, patience=_PATIENCE)
        self._models = models
        self._files = files
        self._stopped = False
        self._kept: list[str] = []

    async def run(self, connections: int) -> None:
        """Ask over some connections at once."""
        await asyncio.gather(*(self._ask_on() for _ in range(connections)))
        self._caller.close()

    def stop(self) -> None:
        """Begin no request any more."""
        self._stopped = True

    async def _ask_on(self) -> None:
        while not self._stopped:
            number = self.sent
            self.sent += 1
            began = time.monotonic()
            try:
                outcome = await self._ask(number)
            except (NotConnected, Cut, NoAnswer) as error:
                outcome = "failed"
                self.notes.append(f"request {number}: {type(error).__name__}")
            self.counts[outcome] += 1
            self.latencies.append((began, time.monotonic() - began))

    async def _ask(self, number: int) -> str:
        picture = number % len(self._files)
        if number % 20 == 7 and self._kept:
            answer = await self._caller.ask(get(f"/attention?id={self._kept[-1]}&format=json"))
            if answer.status == 404:
                return "kept picture unknown"
            if answer.status != 200:
                return self._failed(number, answer.status, answer.body)
            grid = [len(json.loads(answer.body)["values"]), len(json.loads(answer.body)["values"][0])]
            return "kept picture found" if grid in [model.grid for model in self._models] else "mixed up"
        if number % 20 == 13:
            chosen = [picture, (picture + 1) % len(self._files)]
            answer = await self._caller.ask(form("/classify/batch", [self._files[each] for each in chosen]))
            documents = json.loads(answer.body).get("results", []) if answer.status == 200 else []
        else:
            chosen = [picture]
            query = "attention=true" if number % 5 == 1 else ""
            answer = await self._caller.ask(post(f"/classify?{query}", self._files[picture]))
            documents = [json.loads(answer.body)]
        if answer.status != 200 or any("error" in document for document in documents):
            return self._failed(number, answer.status, answer.body)
        if documents[-1].get("id"):
            self._kept = [*self._kept[-7:], documents[-1]["id"]]
        for model in self._models:
            if all(model.gave(document, each) for document, each in zip(documents, chosen, strict=True)):
                return f"wholly of {model.name}"
        self.notes.append(f"request {number}: of neither: {answer.body[:300]!r}")
        return "mixed up"

    def _failed(self, number: int, status: int, body: bytes) -> str:
        self.notes.append(f"request {number}: status {status}: {body[:200]!r}")
        return "failed"


class Operator:
    """Loads checkpoints by the protocol's repository."""

    def __init__(self, port: int) -> None:
        self.caller = HttpCaller("127.0.0.1", port, patience=_LOAD_PATIENCE)

    async def load(self, served: str, folder: Path) -> None:
        """Let the checkpoint of a folder take over from the model of this name.

        Raises:
            RuntimeError: the service refuses.
        """
        request = post(
            f"/v2/repository/models/{served}/load",
            json.dumps({"parameters": {"checkpoint": folder.name}}).encode(),
            "application/json",
        )
        answer = await self.caller.ask(request.replace(b"\r\n", f"\r\nAuthorization: Bearer {_KEY}\r\n".encode(), 1))
        if answer.status != 200:
            raise RuntimeError(f"not loaded: {answer.status} {answer.body!r}")

    async def learn(self, folder: Path, files: Sequence[bytes]) -> Model:
        """Return the served model with its answers."""
        classes = json.loads((await self.caller.ask(get("/model"))).body)["classes"]
        documents = []
        for data in files:
            answer = await self.caller.ask(post(f"/classify?top_k={classes}&attention=true", data))
            documents.append(json.loads(answer.body))
        answers = [
            {f"{each['index']}:{each['label']}": each["score"] for each in document["predictions"]}
            for document in documents
        ]
        return Model(documents[0]["model"], folder, answers, documents[0]["attention"]["grid"])


async def swap(configuration: str, arguments: argparse.Namespace, files: list[bytes]) -> dict[str, Any]:
    """Run one configuration, and return what became of the requests."""
    with tempfile.TemporaryDirectory(prefix="vitserve-swaps-") as name:
        first, second = Path(name) / "first", Path(name) / "second"
        shutil.copytree(REPOSITORY / "model/weights/cifar10", first)
        second.mkdir()
        checkpoints.write(second, _OTHER)
        settings = {"VIT_CHECKPOINT": str(first), "VIT_CHECKPOINT_FOLDER": name, "VIT_ADMIN_KEY": _KEY}
        # Few pictures are kept, so that what is resident belongs to the models, or was freed in the last 30 s.
        settings |= {"VIT_RECENT_BYTES": "1MiB"}
        settings |= {"VIT_DRAIN_DELAY": "0", **_CONFIGURATIONS[configuration]}
        service = ServiceProcess(Path(name) / "log", settings)
        try:
            await asyncio.to_thread(service.wait_until_ready)
            operator = Operator(service.port)
            models = [await operator.learn(first, files)]
            await operator.load(models[0].name, second)
            models.append(await operator.learn(second, files))
            callers = Callers(service.port, models, files)
            calling = asyncio.create_task(callers.run(arguments.connections))
            spans: list[tuple[float, float]] = []
            memory: list[float] = []
            for number in range(arguments.swaps):
                while callers.sent < arguments.requests * (number + 1) / (arguments.swaps + 1):
                    await asyncio.sleep(0.02)
                served, following = models[(number + 1) % 2], models[number % 2]
                memory.append(whole(service.pids()))
                began = time.monotonic()
                await operator.load(served.name, following.folder)
                spans.append((began, time.monotonic()))
            while callers.sent < arguments.requests:
                await asyncio.sleep(0.02)
            callers.stop()
            await calling
            memory.append(whole(service.pids()))
            exit_code = await asyncio.to_thread(service.stop)
        finally:
            service.stop()
        if callers.notes:
            print("\n".join(callers.notes[:20]), service.log[-4000:], sep="\n", file=sys.stderr)
    during = [
        seconds
        for began, seconds in callers.latencies
        if any(start < began + seconds and began < end for start, end in spans)
    ]
    quiet = [seconds for began, seconds in callers.latencies if not any(start < began < end for start, end in spans)]
    took = [end - start for start, end in spans]
    return {
        "requests": sum(callers.counts.values()),
        "swaps": len(spans),
        **{f"wholly of {model.name}": callers.counts[f"wholly of {model.name}"] for model in models},
        "kept picture found": callers.counts["kept picture found"],
        "kept picture unknown": callers.counts["kept picture unknown"],
        "mixed up": callers.counts["mixed up"],
        "failed": callers.counts["failed"],
        "a swap, s: median": round(statistics.median(took), 2),
        "a swap, s: longest": round(max(took), 2),
        **_quantiles("between swaps", quiet),
        **_quantiles("during a swap", during),
        "memory at the first swap, MiB": memory[0],
        "memory in the middle, MiB": memory[len(memory) // 2],
        "memory at the end, MiB": memory[-1],
        "exit code": exit_code,
    }


def _quantiles(when: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds) or [0.0]
    places = {"p50": len(ordered) // 2, "p99": int(0.99 * (len(ordered) - 1)), "longest": -1}
    return {f"{when}, ms: {name}": round(1000 * ordered[place], 1) for name, place in places.items()}


def main() -> int:
    """Run the configurations, print their table, save the record."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    bodies = [file.read_bytes() for file in files]
    arguments.record.unlink(missing_ok=True)
    about = {"pictures": origin, "models": "the bundled one, and a random one of 48 pixels and 7 classes"}
    record = Record(arguments.record, dtype="auto", about=about)
    found = record.section("configurations")
    for configuration in [name for name in _CONFIGURATIONS if arguments.only in (None, name)]:
        found[configuration] = asyncio.run(swap(configuration, arguments, bodies))
        record.save()
    names = list(next(iter(found.values())))
    print(table(["", *found], [[name, *(each[name] for each in found.values())] for name in names]), flush=True)
    return int(any(each["mixed up"] or each["failed"] or each["exit code"] for each in found.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.swaps", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="at least, of each configuration")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--only", choices=list(_CONFIGURATIONS))
    parser.add_argument("--record", type=Path, default=RESULTS / "swaps.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
