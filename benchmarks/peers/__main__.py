"""vitserve beside its peers: `python -m benchmarks.peers`. Medians over interleaved rounds, and ratios within them.

Servers are started and warmed before the first of them is measured, and all but the one that is loaded are held
(SIGSTOP): some poll while they are idle. Every measurement is saved as soon as it is made; the same command goes on
where the record stops.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import checkpoints, pictures
from benchmarks.load import Loader
from benchmarks.peers import graph
from benchmarks.peers.common import Decoder, Options, TorchClassifier
from benchmarks.record import RESULTS, Record, medians, table
from benchmarks.servers import SERVERS, VITSERVE, Running, ServerFailed, ask, running

_OURS = f"{VITSERVE.name}, openvino"
_MARGIN = 0.02
"""Least distance of the two best scores of a picture whose best class has to be the same everywhere."""
_START_SECONDS = 400
"""torch.compile takes its time while others use the machine."""


def compare(record: Record, name: str, files: Sequence[Path], arguments: argparse.Namespace) -> None:
    """Measure one model: every server in turn, as many rounds as the record lacks."""
    model, origin = checkpoints.ensure(name)
    graph.ensure(model)
    section = record.section("models", name)
    section["weights"] = origin
    rounds = record.section("models", name, "rounds")
    with ExitStack() as stack:
        started = _start(stack, section, model, files, arguments)
        for load, server in started.values():
            with server.thawed():
                load.closed(server.url, connections=arguments.connections, seconds=arguments.warm_seconds)
        while len(rounds.get(_OURS, [])) < arguments.rounds:
            for row, (load, server) in started.items():
                with server.thawed():
                    load.closed(server.url, connections=arguments.connections, seconds=1)
                    found = load.closed(server.url, connections=arguments.connections, seconds=arguments.seconds)
                rounds.setdefault(row, []).append(found.as_json())
                record.save()
                print(f"{name}, {row}: {found}", file=sys.stderr, flush=True)


def _start(
    stack: ExitStack, section: dict[str, Any], model: Path, files: Sequence[Path], arguments: argparse.Namespace
) -> dict[str, tuple[Loader, Running]]:
    """Start the servers, and compare their answers; the record says why some do not start."""
    started, first = {}, files[0].read_bytes()
    expected = section.setdefault("expected", []) or _reference(model, files)
    section["expected"] = expected
    for server in SERVERS:
        for name, config in server.configs.items() if server.name in (VITSERVE.name, *arguments.servers) else ():
            row, engine = f"{server.name}, {name}", {"PEER_ENGINE": name.split(",")[0]}
            one = running(server, model, {**engine, **config}, picture=first, timeout=_START_SECONDS, held=server.held)
            try:
                running_ = stack.enter_context(one)
            except (OSError, ServerFailed) as error:
                section.setdefault("failed", {})[row] = str(error)[-500:]
                print(f"{row}: {error}", file=sys.stderr)
                continue
            started[row] = (Loader(files, server.protocol), running_)
            with running_.thawed():
                answers = [ask(running_.url, server.protocol, file.read_bytes()) for file in files]
            sure = [(one["index"], got) for one, got in zip(expected, answers, strict=True) if one["margin"] > _MARGIN]
            section.setdefault("top1", {})[row] = f"{sum(a == b for a, b in sure)} of {len(sure)} the same"
    return started


def _reference(model: Path, files: Sequence[Path]) -> list[dict[str, float]]:
    """The best class of each picture in float32 in this process, and its distance from the next."""
    options = Options(model, threads=2, batch=1, dtype="float32")
    decode, classifier = Decoder(model), TorchClassifier(options)
    rows = np.concatenate([classifier.probabilities([decode(file.read_bytes())]) for file in files])
    top = np.sort(rows, axis=1)
    margins = top[:, -1] - top[:, -2]
    return [{"index": int(r.argmax()), "margin": round(float(m), 4)} for r, m in zip(rows, margins, strict=True)]


def report(data: Mapping[str, Any]) -> str:
    """Markdown: each model's servers, the fastest first, beside vitserve within the same rounds."""
    lines = []
    for name, model in data["models"].items():
        rows = []
        for row, done in model["rounds"].items():
            pairs = zip(done, model["rounds"][_OURS], strict=False)
            share = statistics.median(theirs["rate"] / ours["rate"] for theirs, ours in pairs)
            middle, lost = medians(done), sum(each["refused"] + each["broken"] for each in done)
            same = model["top1"].get(row)
            rows.append((row, middle["rate"], f"{share:.2f}", middle["p50"], middle["p99"], lost, same))
        rows.sort(key=lambda row: -row[1])
        lines.append(table([name, "answered/s", "of vitserve's", "p50 ms", "p99 ms", "lost", "top-1"], rows))
    return "\n\n".join(lines)


def main() -> int:
    """Measure what the record lacks, then print its tables."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # a run that is ended stops its servers
    files, origin = pictures.ensure()
    about = {"pictures": origin, "connections": arguments.connections}
    record = Record(arguments.record, dtype="bfloat16", about=about)
    for server in SERVERS:
        try:
            record.section("servers")[server.name] = server.version()
        except (OSError, subprocess.CalledProcessError):
            print(f"{server.name} is not installed: run make bench-peers", file=sys.stderr)
    for name in arguments.models:
        compare(record, name, files, arguments)
    print(report(record.data))
    return 0


def _arguments() -> argparse.Namespace:
    servers = [server.name for server in SERVERS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--servers", nargs="+", default=servers, choices=servers, help="beside vitserve")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--warm-seconds", type=float, default=20)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--record", type=Path, default=RESULTS / "peers.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
