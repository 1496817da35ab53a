"""Twelve heads on one backbone beside one model: `python -m benchmarks.models`. Memory, start, rate, eight at once.

Models of random heads on the same backbone lie in a folder. Told are, for the first of them alone and for all: seconds
until every model is ready with an empty cache and with what was kept, MiB then (proportional set size), answers a
second of 36 connections (to all models in turn, or all to the one), and milliseconds of one picture to one model and
to eight at once. Rounds of the two alternate; ratios are taken within rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import checkpoints, pictures
from benchmarks.load import Loader, Protocol
from benchmarks.record import RESULTS, Record, table
from benchmarks.reliability import Service
from benchmarks.servers import resident_mib
from model.checkpoint import load_checkpoint, native

HEADS = 12
ASKED = 8
CONNECTIONS = 36


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
    return names


@contextmanager
def serving(folder: Path, cache: Path) -> Iterator[tuple[Service, float]]:
    """Start a service of a folder's models; gives it with the seconds until all were ready."""
    with tempfile.TemporaryDirectory(prefix="vitserve-models-") as own:
        began = time.monotonic()
        settings = {"VIT_MODELS": str(folder), "VIT_CACHE_DIR": str(cache), "VIT_DRAIN_DELAY": "0"}
        service = Service(Path(own), settings | {"VIT_LOG_LEVEL": "error"})
        try:
            asyncio.run(service.until_ready())
            while any(each["state"] != "ready" for each in get(f"{service.url}/models")):
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
        form = {"Content-Type": "application/octet-stream"}
        protocol = Protocol(f"/classify?model={name}", form, lambda data: data, lambda _: 0)
        load = Loader(files, protocol).closed(url, connections=CONNECTIONS // HEADS, seconds=seconds)
        assert not load.refused and not load.broken, load
        return load.rate

    with ThreadPoolExecutor(HEADS) as pool:
        return sum(pool.map(send, names))


def milliseconds(url: str, picture: bytes, names: list[str], count: int = 30) -> float:
    """Median of lone requests, of one picture to these models."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        get(f"{url}/classify?model={','.join(names)}&top_k=1", picture)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> int:
    """Measure, record and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__)
    parser.add_argument("--checkpoint", default=None, help="whose backbone; default the ViT-Ti/16 of 224 px")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--record", type=Path, default=RESULTS / "models.json")
    arguments = parser.parse_args()
    files, source = pictures.ensure()
    checkpoint = arguments.checkpoint or str(checkpoints.ensure("vit224")[0])
    record = Record(arguments.record, dtype="auto", about={"checkpoint": checkpoint, "pictures": source})
    rows = []
    with tempfile.TemporaryDirectory(prefix="vitserve-heads-") as name:
        root = Path(name)
        for folder, count in (("one", 1), ("all", HEADS)):
            (root / folder).mkdir()
            names = write_models(checkpoint, root / folder, count)
        for turn in range(1 + arguments.rounds):  # the first start has an empty cache
            found: dict[str, list[float]] = {}
            for folder, own in (("one", names[:1]), ("all", names)):
                with serving(root / folder, root / f"cache-{folder}") as (service, ready):
                    mib = resident_mib(service.process.pid)
                    spread = (own * HEADS)[:HEADS]
                    several = own[:ASKED] if len(own) > 1 else own
                    lone = milliseconds(service.url, files[0].read_bytes(), several)
                    answers = rate(service.url, spread, files, arguments.seconds) if turn else 0.0
                    found[folder] = [round(value, 2) for value in (ready, mib, lone, answers)]
            record.section("rounds")[str(turn)] = found
            record.save()
            one, every = found["one"], found["all"]
            ratios = [round(ours / theirs, 3) if theirs else 0.0 for theirs, ours in zip(one, every, strict=True)]
            rows += [(turn, "one", *one), (turn, "twelve", *every), (turn, "ratio", *ratios)]
    print(table(["round", "models", "ready, s", "MiB", "one picture, ms (8 heads)", "answers/s"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
