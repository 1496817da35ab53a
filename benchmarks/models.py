"""Starts, and many models in one service: `python -m benchmarks.models [PART...]`, each a section
of the record.

    starts    seconds to ready, and memory: of a start with an empty cache folder, and of later ones
    heads     twelve heads on one backbone, and one model: start, memory, rate, one picture to eight
    fair      a lone caller of one model, alone and with thirty callers of another

For `heads`, a folder has models with random heads on the same backbone. The record has, for the
first model alone and for all models: seconds until every model is ready with an empty and with a
full cache, MiB twelve seconds later (proportional set size), milliseconds of one picture to one
model and to eight at once, and answers per second over 36 connections, to all models in turn or to
the first. Rounds of the two alternate, and ratios are within rounds.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import checkpoints, pictures
from benchmarks.attacked_services import Service
from benchmarks.load import Load, Loader, Protocol
from benchmarks.record import Record, command_line
from benchmarks.servers import VITSERVE, resident_mib
from model.checkpoint import load_checkpoint, native
from vitserve.client import Client

HEADS = 12
ASKED = 8
CONNECTIONS = 36
# Seconds after which graphs of all sizes are compiled.
_SETTLED = 12.0


def write_models(checkpoint: str, folder: Path, count: int) -> list[str]:
    """Write models that differ in the head alone, and return their names."""
    base = load_checkpoint(checkpoint)
    names = [f"head{number:02}" for number in range(count)]
    for number, name in enumerate(names):
        generator = torch.Generator().manual_seed(number)
        tensors = dict(base.tensors)
        weight = tensors["head.weight"]
        tensors["head.weight"] = (
            torch.randn(weight.shape, generator=generator) / weight.shape[1] ** 0.5
        )
        (folder / name).mkdir(parents=True)
        native.write(
            folder / name,
            replace(base, name=name, tensors=tensors, calibration=None),
            dtype=torch.float32,
        )
        for file in (folder / name).iterdir():  # a start reads files anew if they are recent
            os.utime(file, (0, 0))
    return names


@contextmanager
def serving(cache: Path, **settings: str) -> Iterator[tuple[Service, float]]:
    """Start a service; gives it with the seconds until none of its models was loading."""
    began = time.monotonic()
    service = Service(VITSERVE, {"VIT_CACHE_DIR": str(cache), "VIT_DRAIN_DELAY": "0", **settings})
    try:
        asyncio.run(service.until_ready())
        with Client(service.url) as client:
            while any(each.state == "loading" for each in client.models()):
                time.sleep(0.02)
        yield service, time.monotonic() - began
    finally:
        service.stop()


def milliseconds(url: str, picture: bytes, *asked: list[str]) -> list[float]:
    """Medians of lone requests, of one picture to these models or to those, in turn."""
    times: list[list[float]] = [[] for _ in asked]
    with Client(url) as client:
        for names, found in [*zip(asked, times, strict=True)] * 30:
            began = time.perf_counter()
            client.classify_by(picture, names, top_k=1)
            found.append(1000 * (time.perf_counter() - began))
    return [statistics.median(found) for found in times]


def load(url: str, names: list[str], files: list[Path], connections: int, seconds: float) -> Load:
    """What callers of these models in turn see, each of whom sends its next request when it has its
    answer.
    """
    form = {"Content-Type": "application/octet-stream"}
    protocols = [
        Protocol(f"/classify?model={name}&top_k=1", form, bytes, lambda _: 0) for name in names
    ]
    return Loader(files, *protocols).run(url, connections=connections, seconds=seconds)


def starts(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """The first start of a checkpoint and later ones: seconds, and MiB then."""
    checkpoint = arguments.checkpoint or "bundled"
    found = list[tuple[float, float]]()
    for _ in range(1 + arguments.rounds):
        with serving(root / "cache", VIT_CHECKPOINT=checkpoint) as (service, ready):
            found.append((round(ready, 2), resident_mib(service.process.pid)))
    record.note(found, "starts", Path(checkpoint).name)


def heads(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """Compare twelve heads on one backbone with one model."""
    checkpoint = arguments.checkpoint or str(checkpoints.ensure(checkpoints.VIT224)[0])
    names = {
        folder: write_models(checkpoint, root / folder, count)
        for folder, count in (("one", 1), ("twelve", HEADS))
    }
    for turn in range(1 + arguments.rounds):  # the first start has an empty cache
        found: dict[str, list[float]] = {}
        for folder, own in names.items():
            with serving(root / f"cache-{folder}", VIT_MODELS=str(root / folder)) as (
                service,
                ready,
            ):
                time.sleep(_SETTLED)
                mib = resident_mib(service.process.pid)
                asked = milliseconds(service.url, files[0].read_bytes(), own[:1], own[:ASKED])
                answers = load(service.url, own, files, CONNECTIONS, arguments.seconds)
                assert not answers.refused and not answers.broken, answers
                found[folder] = [round(value, 2) for value in (ready, mib, *asked, answers.rate)]
        found["ratio"] = [
            round(ours / theirs, 3) for theirs, ours in zip(*found.values(), strict=True)
        ]
        record.note(found, "heads", Path(checkpoint).name, str(turn))


def fair(root: Path, record: Record, files: list[Path], arguments: argparse.Namespace) -> None:
    """Measure a lone caller of one model while thirty callers use another model."""
    root.mkdir()
    (root / "vit32").symlink_to(checkpoints.ensure(checkpoints.VIT32)[0])
    for seed, name in enumerate(("vit224", "thirty")):
        checkpoints.write(root / name, replace(checkpoints.VIT224, name=name), seed)
    with serving(root.parent / "cache", VIT_MODELS=str(root)) as (service, _):
        for lone in ("vit32", "vit224"):
            alone = load(service.url, [lone], files, 1, arguments.seconds)
            with ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(
                    load, service.url, ["thirty"], files, 30, arguments.seconds + 8
                )
                time.sleep(4)  # until they send
                own = load(service.url, [lone], files, 1, arguments.seconds)
            seen = {"beside 0": alone, "beside 30": own, "thirty": theirs.result()}
            record.note({name: each.as_json() for name, each in seen.items()}, "fair", lone)


PARTS = {part.__name__: part for part in (starts, heads, fair)}


def main() -> None:
    """Measure, record and print."""
    parser = command_line("models", __doc__, rounds=3, seconds=10)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--checkpoint",
        default=None,
        help="of starts, else the bundled one; of heads, else the ViT-Ti/16 of 224 px",
    )
    arguments = parser.parse_args()
    files, source = pictures.ensure()
    record = Record(arguments.record, dtype="auto", about={"pictures": source})
    for part in arguments.parts:
        with tempfile.TemporaryDirectory(prefix="vitserve-heads-") as name:
            PARTS[part](Path(name) / "models", record, files, arguments)


if __name__ == "__main__":
    main()
