"""Many models in one service: `python -m benchmarks.models`. Each part is a section of the record.

    heads     twelve heads on one backbone beside one model: memory, start, rate, eight at once
    several   one picture to one head of a ViT-S, and to eight at once, in turn
    changes   20,000 requests to twelve models while models are loaded, unloaded, replaced and deleted
    memory    what is resident after each of 21 loads and unloads of one of them
    fair      a lone caller of one model, alone and beside thirty of another on the same cores
    evict     a caller of the default model beside those who ask for two models that do not fit together

Of heads: models of random heads on the same backbone lie in a folder. Told are, for the first of them alone and for
all: seconds until every model is ready with an empty cache and with what was kept, MiB twelve seconds later
(proportional set size), answers a second of 36 connections (to all models in turn, or all to the one), and milliseconds
of one picture to one model and to eight at once. Rounds of the two alternate; ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import checkpoints, pictures
from benchmarks.load import Load, Loader, Protocol
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability import Service
from benchmarks.servers import resident_mib
from model.checkpoint import load_checkpoint, native

HEADS = 12
ASKED = 8
CONNECTIONS = 36
VITS224: Final = replace(checkpoints.VIT224, name="vits224", width=384, heads=6)
# How far the score of a model's answer lies from its own at most, whatever it was batched with.
_CLOSE: Final = 0.02
# Seconds after which graphs of all sizes are compiled.
_SETTLED: Final = 12.0
ADMIN: Final = {"Authorization": "Bearer admin"}


def write_models(checkpoint: str, folder: Path, count: int) -> list[str]:
    """Write models that differ in the head alone, and return their names."""
    base = load_checkpoint(checkpoint)
    names = [f"head{number:02}" for number in range(count)]
    for number, name in enumerate(names):
        generator, tensors = torch.Generator().manual_seed(number), dict(base.tensors)
        weight = tensors["head.weight"]
        tensors["head.weight"] = torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
        (folder / name).mkdir()
        native.write(folder / name, replace(base, name=name, tensors=tensors, calibration=None), dtype=torch.float32)
        for file in (folder / name).iterdir():  # what was written just now is read again at each start
            os.utime(file, (0, 0))
    return names


@contextmanager
def serving(folder: Path, cache: Path, **more: str) -> Iterator[tuple[Service, float]]:
    """Start a service of a folder's models; gives it with the seconds until none was loading."""
    with tempfile.TemporaryDirectory(prefix="vitserve-models-") as own:
        began = time.monotonic()
        settings = {"VIT_MODELS": str(folder), "VIT_CACHE_DIR": str(cache), "VIT_DRAIN_DELAY": "0"}
        service = Service(Path(own), settings | {"VIT_LOG_LEVEL": "error"} | more)
        try:
            asyncio.run(service.until_ready())
            while any(each["state"] == "loading" for each in get(f"{service.url}/models")):
                time.sleep(0.02)
            yield service, time.monotonic() - began
        finally:
            service.stop()


def get(url: str, body: bytes | None = None) -> list[dict[str, object]]:
    """Return the document at an address."""
    headers = {"Content-Type": "application/octet-stream"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as answer:
        found: list[dict[str, object]] = json.load(answer)
        return found


def rate(url: str, names: list[str], files: list[Path], seconds: float) -> float:
    """Answers a second of twelve senders, each of which asks one model."""

    def send(name: str) -> float:
        found = load(url, name, files, CONNECTIONS // HEADS, seconds)
        assert not found.refused and not found.broken, found
        return found.rate

    with ThreadPoolExecutor(HEADS) as pool:
        return sum(pool.map(send, names))


def milliseconds(url: str, picture: bytes, *asked: list[str], count: int = 30) -> list[float]:
    """Medians of lone requests, of one picture to these models or to those, in turn."""
    times: list[list[float]] = [[] for _ in asked]
    for _ in range(count):
        for names, found in zip(asked, times, strict=True):
            began = time.perf_counter()
            get(f"{url}/classify?model={','.join(names)}&top_k=1", picture)
            found.append(1000 * (time.perf_counter() - began))
    return [round(statistics.median(found), 2) for found in times]


class Caller:
    """A connection that is kept."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
        """Return the status and the document of an answer."""
        self._connection.request(method, path, body, ADMIN | {"Content-Type": "application/octet-stream"})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read() or b"{}")


def load(url: str, name: str, files: list[Path], connections: int, seconds: float) -> Load:
    """What callers of one model see, each of whom sends its next request when it has its answer."""
    form = {"Content-Type": "application/octet-stream"}
    protocol = Protocol(f"/classify?model={name}&top_k=1", form, lambda data: data, lambda _: 0)
    return Loader(files, protocol).closed(url, connections=connections, seconds=seconds)


def beside(url: str, others: dict[str, int], name: str, files: list[Path], seconds: float) -> dict[str, Any]:
    """What a lone caller of a model sees beside so many of others, and what these see."""
    with ThreadPoolExecutor(HEADS) as pool:
        theirs = {each: pool.submit(load, url, each, files, count, seconds + 4) for each, count in others.items()}
        time.sleep(2.0)  # until they send
        own = load(url, name, files, 1, seconds)
        return {"lone": own.as_json()} | {each: found.result().as_json() for each, found in theirs.items()}


def heads(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """Twelve heads on one backbone beside one model."""
    checkpoint = arguments.checkpoint or str(checkpoints.ensure(checkpoints.VIT224)[0])
    rows = []
    for folder, count in (("one", 1), ("all", HEADS)):
        (root / folder).mkdir()
        names = write_models(checkpoint, root / folder, count)
    for turn in range(1 + arguments.rounds):  # the first start has an empty cache
        found: dict[str, list[float]] = {}
        for folder, own in (("one", names[:1]), ("all", names)):
            with serving(root / folder, root / f"cache-{folder}") as (service, ready):
                time.sleep(_SETTLED)
                mib = resident_mib(service.process.pid)
                spread = (own * HEADS)[:HEADS]
                several = own[:ASKED] if len(own) > 1 else own
                [lone] = milliseconds(service.url, files[0].read_bytes(), several)
                answers = rate(service.url, spread, files, arguments.seconds) if turn else 0.0
                found[folder] = [round(value, 2) for value in (ready, mib, lone, answers)]
        record.section("heads", Path(checkpoint).name)[str(turn)] = found
        record.save()
        one, every = found["one"], found["all"]
        ratios = [round(ours / theirs, 3) if theirs else 0.0 for theirs, ours in zip(one, every, strict=True)]
        rows += [(turn, "one", *one), (turn, "twelve", *every), (turn, "ratio", *ratios)]
    print(table(["round", "models", "ready, s", "MiB", "one picture, ms (8 heads)", "answers/s"], rows))


def several(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """One picture to one head of a ViT-S and to eight, in turn."""
    checkpoints.write(root.parent / "vits224", VITS224)
    names = write_models(str(root.parent / "vits224"), root, ASKED)
    with serving(root, root.parent / "cache") as (service, _):
        time.sleep(_SETTLED)
        found = milliseconds(service.url, files[0].read_bytes(), names[:1], names, count=200)
        record.section("several")["ms of one head, of eight, ratio"] = [*found, round(found[1] / found[0], 3)]
    print(found)


def models_of_changes(root: Path) -> list[str]:
    """Write eleven models of one backbone and one of another, and return their names."""
    checkpoints.write(root / "other", checkpoints.VIT32, seed=1)
    return [*write_models(str(checkpoints.ensure(checkpoints.VIT32)[0]), root, HEADS - 1), "other"]


def answer(caller: Caller, name: str, body: bytes) -> tuple[object, float]:
    """Return a model's best class of a picture and its score, or the code of the problem."""
    status, document = caller.ask("POST", f"/classify?model={name}&top_k=1", body)
    best = document["predictions"][0] if status == 200 else {"index": document.get("code", status), "score": 0.0}
    return best["index"], best["score"]


def changes(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """No request is lost, and none is answered by another model."""
    names, settings = models_of_changes(root), {"VIT_ADMIN_KEY": "admin", "VIT_CHECKPOINT_FOLDER": str(root)}
    bodies, numbers, over = [each.read_bytes() for each in files], itertools.count(), threading.Event()
    with serving(root, root.parent / "cache", VIT_WORKERS=arguments.workers, **settings) as (service, _):
        admin, outcomes = Caller(service.url), Counter[str]()

        def ask(seed: int) -> None:
            caller, chosen = Caller(service.url), random.Random(seed)
            while next(numbers) < arguments.requests and time.monotonic() < ends:
                name, place = chosen.choice([*names, "guest"]), chosen.randrange(len(bodies))
                found, score = answer(caller, name, bodies[place])
                wanted = [known[each, place] for each in (names[:2] if name == "guest" else [name])]
                is_right = any(found == index and abs(score - own) < _CLOSE for index, own in wanted)
                is_gone = name == "guest" and found == "unknown_model"
                outcomes["gone" if is_gone else "right" if is_right else f"wrong: {found}"] += 1

        def change() -> None:
            for turn in itertools.count():
                if over.is_set():
                    return
                body = json.dumps({"checkpoint": names[turn % 2]}).encode()
                statuses = [admin.ask("PUT", "/models/guest", body)[0]]
                statuses.append(admin.ask("POST", f"/v2/repository/models/{names[-1 - turn % 2]}/unload")[0])
                statuses += [admin.ask("DELETE", "/models/guest")[0]] if turn % 3 == 2 else []
                outcomes.update(f"change {status}" for status in statuses)
                time.sleep(0.2)

        known = {(name, place): answer(admin, name, body) for name in names for place, body in enumerate(bodies)}
        ends = time.monotonic() + arguments.most_seconds
        with ThreadPoolExecutor(9) as pool:
            changing = pool.submit(change)
            for each in [pool.submit(ask, seed) for seed in range(8)]:
                each.result()
            over.set()
            changing.result()
        found = record.section("changes", f"{arguments.workers} workers")
        found[time.strftime("%F %T")] = dict(sorted(outcomes.items()))
    print(json.dumps(outcomes))


def memory(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """What is unloaded gives its memory back, again and again."""
    models_of_changes(root)
    with serving(root, root.parent / "cache", VIT_ADMIN_KEY="admin") as (service, _):
        admin, mib = Caller(service.url), list[float]()
        for turn in range(21):
            answer(admin, "other", files[0].read_bytes())
            if turn in (0, 20):
                time.sleep(_SETTLED)
            admin.ask("POST", "/v2/repository/models/other/unload")
            mib.append(resident_mib(service.process.pid))
        record.section("memory")["MiB after each of 21 unloads, of which the first and last are settled"] = mib
    print(mib)


def fair(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """Thirty callers of one model do not starve the one caller of another."""
    (root / "lone").symlink_to(checkpoints.ensure(checkpoints.VIT32)[0])
    for seed, name in enumerate(("same", "thirty")):
        checkpoints.write(root / name, replace(checkpoints.VIT224, name=name), seed)
    with serving(root, root.parent / "cache") as (service, _):
        for lone in ("lone", "same"):
            for others in (0, 30):
                found = beside(service.url, {"thirty": others} if others else {}, lone, files, arguments.seconds)
                record.section("fair", "vit32" if lone == "lone" else "vit224")[f"beside {others}"] = found
                print(lone, others, json.dumps(found))


def evict(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """Callers who make the service load again and again do not keep the default model from its caller."""
    (root / "default").symlink_to(checkpoints.ensure(checkpoints.VIT32)[0])
    for seed, name in enumerate(("first", "second")):
        # Larger ones, so that what is measured of the default's memory decides nothing.
        checkpoints.write(root / name, replace(VITS224, name=name), seed)
    for _ in range(2):  # the second time as they are measured, from kept graphs
        with serving(root, root.parent / "cache", VIT_MODEL_NAME="default") as (service, _):
            sizes = {str(each["name"]): int(str(each["bytes"])) for each in get(f"{service.url}/models")}
    most = sizes["default"] + max(sizes["first"], sizes["second"]) * 5 // 4
    settings = {"VIT_MODEL_NAME": "default", "VIT_MODELS_BYTES": str(most)}
    with serving(root, root.parent / "cache", **settings) as (service, _):
        for each in (0, 1, 10):
            others = dict.fromkeys(("first", "second"), each) if each else {}
            found = beside(service.url, others, "default", files, arguments.seconds)
            record.section("evict")[f"beside {2 * each}"] = found
            print(2 * each, json.dumps(found))
        with urllib.request.urlopen(f"{service.url}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        counted = [line for line in lines if line.startswith(("vit_model_evictions_total", "vit_model_loads_total{"))]
        record.section("evict")["counted"] = counted
        print(counted)


PARTS: Final = {part.__name__: part for part in (heads, several, changes, memory, fair, evict)}


def main() -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--checkpoint", default=None, help="of heads: whose backbone; default the ViT-Ti/16 of 224 px")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--requests", type=int, default=20_000, help="of changes")
    parser.add_argument("--workers", default="1", help="of changes")
    parser.add_argument("--most-seconds", type=float, default=600.0, help="of changes; the next run adds to the record")
    parser.add_argument("--record", type=Path, default=RESULTS / "models.json")
    arguments = parser.parse_args()
    files, source = pictures.ensure()
    record = Record(arguments.record, dtype="auto", about={"pictures": source})
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="vitserve-heads-") as name:
            root = Path(name) / "models"
            root.mkdir()
            PARTS[part](root, record, files, arguments)
        record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
