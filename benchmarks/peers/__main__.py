"""vitserve beside its peers: `python -m benchmarks.peers`. Medians over interleaved rounds, and ratios within them.

    tune    every server with each of its candidate configurations, once; the fastest is kept
    rounds  every server in turn, several times over: a closed loop by wrk
    pace    half of the best peer's rate as an open loop: the tail that a caller sees

Servers are started and warmed before the first of them is measured, and all but the one that is loaded are held
(SIGSTOP): some poll while they are idle. Every measurement is saved as soon as it is made; the same command goes on
where the record stops.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import checkpoints, pictures
from benchmarks.load import Load, Loader, loader
from benchmarks.peers import graph
from benchmarks.peers.common import Decoder, Options, TorchClassifier
from benchmarks.record import RESULTS, Record, medians, table
from benchmarks.servers import SERVERS, VITSERVE, Config, Running, Server, ServerFailed, ask, running

_ENGINES = ("torch", "compile", "openvino")
_STABLE = 0.05
"""Two seconds of warming agree when their rates differ by less."""
_MARGIN = 0.02
"""Least distance of the two best scores of a picture whose best class has to be the same everywhere."""
_START_SECONDS = {"compile": 400}
"""Where 120 are too few: for torch.compile while others use the machine."""
_AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""For oneDNN (and what of OpenVINO is made of it), torch's own kernels, and its products in float32."""

Row = tuple[str, Server, Config]
"""A line of the table: its name, the server and its configuration."""

Started = dict[str, tuple[Running, Loader]]


class Comparison:
    """All measurements of one model."""

    def __init__(self, record: Record, model: str, files: Sequence[Path], arguments: argparse.Namespace) -> None:
        self._record = record
        self._arguments = arguments
        self._files = files
        self._model, origin = checkpoints.ensure(model)
        self._section = record.section("models", model)
        self._section["weights"] = origin
        self._servers = [s for s in SERVERS if s is VITSERVE or not arguments.servers or s.name in arguments.servers]
        graph.ensure(self._model)

    def tune(self) -> None:
        """Try each candidate that was not tried; `_best` takes the fastest that refused and lost nothing."""
        for server in self._servers:
            for engine, candidates in (("torch", server.candidates), ("openvino", server.openvino)):
                done = self._of("tune", f"{server.name}, {engine}")
                for config in candidates if server is not VITSERVE and engine in self._arguments.engines else ():
                    if config in [trial["config"] for trial in done]:
                        continue
                    with self._started([(server.name, server, config)]) as started:
                        for running_, load in started.values():
                            found = self._closed(running_, load, self._arguments.tune_seconds)
                            done.append({"config": dict(config), **found.as_json()})
                            self._tell("tune", server.name, found, config)

    def rounds(self) -> None:
        """Peak rate and its latencies, each server in turn in each round."""
        rows = self._rows()
        with self._started(rows) as started:
            for name, server, config in rows:
                if name in started:
                    self._section.setdefault("configs", {})[name] = dict(config)
                    self._check(name, server, started[name][0])
            while len(self._of("rounds", VITSERVE.name)) < self._arguments.rounds:
                for name, (running_, load) in started.items():
                    found = self._closed(running_, load, self._arguments.seconds)
                    self._of("rounds", name).append(found.as_json())
                    self._tell("rounds", name, found, {})

    def pace(self) -> None:
        """Latencies at half of the best peer's rate, the same requests at the same moments for all."""
        peak = {name: medians(done)["rate"] for name, done in self._section.get("rounds", {}).items() if done}
        rates = [rate for name, rate in peak.items() if not name.startswith(VITSERVE.name)]
        if not rates:
            return
        rate = self._section.setdefault("pace_rate", round(max(rates) / 2, 1))
        # A server that is slower than the pace only shows how long its queue grew.
        rows = [row for row in self._rows() if peak.get(row[0], 0) > rate and not self._of("pace", row[0])]
        with self._started(rows) as started:
            for name, (running_, load) in started.items():
                with running_.thawed():
                    found = load.open(running_.url, rate=rate, seconds=2 * self._arguments.seconds)
                self._of("pace", name).append(found.as_json())
                self._tell("pace", name, found, {})

    def _rows(self) -> list[Row]:
        """Who is measured: ours in each candidate, each peer at its best with each engine."""
        ours = [(", ".join(["vitserve", *map("=".join, config.items())]), config) for config in VITSERVE.candidates]
        rows: list[Row] = [(name, VITSERVE, config) for name, config in ours]
        for server in self._servers:
            for engine in self._arguments.engines if server is not VITSERVE else ():
                # Compiled, the module of transformers has the configuration that is best for it uncompiled.
                candidates = server.openvino if engine == "openvino" else server.candidates
                tried = self._of("tune", f"{server.name}, {'openvino' if engine == 'openvino' else 'torch'}")
                best = best_config(tried) or candidates[0]
                more = {"PEER_ENGINE": "compile"} if engine == "compile" else {}
                rows.append((f"{server.name}, {engine}", server, {**best, **more}))
        return rows

    @contextmanager
    def _started(self, rows: Sequence[Row]) -> Iterator[Started]:
        """Start and warm the servers; give those that run by their names, and record why others do not."""
        with ExitStack() as stack:
            started: Started = {}
            for name, server, config in rows:
                timeout = _START_SECONDS.get(config.get("PEER_ENGINE", ""), 120)
                settings = {**config, **self._record.data.get("settings", {})}
                first = self._files[0].read_bytes()
                one = running(server, self._model, settings, picture=first, timeout=timeout, held=server.held)
                try:
                    running_ = stack.enter_context(one)
                except ServerFailed as error:
                    self._section.setdefault("failed", {})[name] = str(error)[-500:]
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                load = stack.enter_context(loader(self._files, server.protocol))
                with running_.thawed():
                    self._warm(running_, load)
                started[name] = (running_, load)
            yield started

    def _warm(self, started: Running, load: Loader) -> None:
        """Load it until two seconds in a row agree, or the time for that is up."""
        deadline, before = time.monotonic() + self._arguments.warm_seconds, 0.0
        while time.monotonic() < deadline:
            rate = load.closed(started.url, connections=self._arguments.connections, seconds=1).rate
            if before and abs(rate - before) <= _STABLE * before:
                return
            before = rate

    def _closed(self, started: Running, load: Loader, seconds: float) -> Load:
        """Load a server as much as it bears, after a second that is not counted."""
        with started.thawed():
            load.closed(started.url, connections=self._arguments.connections, seconds=1)
            return load.closed(started.url, connections=self._arguments.connections, seconds=seconds)

    def _tell(self, phase: str, name: str, load: Load, config: Config) -> None:
        """Save the record and print a line."""
        self._record.save()
        lost = f"  {load.refused} refused, {load.broken} broken" if load.refused or load.broken else ""
        settings = " ".join(f"{key.removeprefix('PEER_')}={value}" for key, value in config.items())
        numbers = f"{load.rate:7.1f}/s  p50 {load.p50:7.1f} ms  p99 {load.p99:7.1f} ms"
        print(f"{phase:8} {name:28} {numbers}{lost}  {settings}", flush=True)

    def _of(self, phase: str, name: str) -> list[Any]:
        found: list[Any] = self._section.setdefault(phase, {}).setdefault(name, [])
        return found

    def _check(self, name: str, server: Server, started: Running) -> None:
        """Compare top-1 over HTTP with float32 in this process, where that is decided by more than the margin."""
        expected = self._section.setdefault("expected", []) or _reference(self._model, self._files)
        self._section["expected"] = expected
        with started.thawed():
            answers = [ask(started.url, server.protocol, file.read_bytes()) for file in self._files]
        sure = [(one["index"], got) for one, got in zip(expected, answers, strict=True) if one["margin"] > _MARGIN]
        self._section.setdefault("top1", {})[name] = f"{sum(a == b for a, b in sure)} of {len(sure)} the same"


def best_config(tried: Sequence[Mapping[str, Any]]) -> Config | None:
    """The configuration of the fastest trial; one that refused or lost requests only if all did."""
    clean = [trial for trial in tried if not trial["refused"] and not trial["broken"]]
    best = max(clean or tried, key=lambda trial: float(trial["rate"]), default=None)
    return None if best is None else best["config"]


def _reference(model: Path, files: Sequence[Path]) -> list[dict[str, float]]:
    options = Options(model, 0, 2, 1, batch=1, wait_ms=0, dtype="float32", engine="torch", streams=1, workers=1)
    decode, classifier = Decoder(model), TorchClassifier(options)
    rows = np.concatenate([classifier.probabilities([decode(file.read_bytes())]) for file in files])
    top = np.sort(rows, axis=1)
    margins = top[:, -1] - top[:, -2]
    return [{"index": int(r.argmax()), "margin": round(float(m), 4)} for r, m in zip(rows, margins, strict=True)]


def report(data: Mapping[str, Any]) -> str:
    """Markdown: each model's servers, the fastest first, beside vitserve within the same rounds."""
    lines = []
    for name, model in data.get("models", {}).items():
        rows = []
        for row, done in model.get("rounds", {}).items():
            pairs = zip(done, model["rounds"][VITSERVE.name], strict=False)
            share = statistics.median(theirs["rate"] / ours["rate"] for theirs, ours in pairs)
            middle = medians(done)
            tail = medians(model.get("pace", {}).get(row, [])).get("p99")
            lost = sum(each["refused"] + each["broken"] for each in done)
            rows.append((row, middle["rate"], f"{share:.2f}", middle["p50"], middle["p99"], tail, lost))
        rows.sort(key=lambda row: -row[1])
        header = [name, "answered/s", "of vitserve's", "p50 ms", "p99 ms", f"p99 at {model.get('pace_rate')}/s", "lost"]
        lines += [table(header, rows), *(f"- {row}: top-1 {told}" for row, told in model.get("top1", {}).items()), ""]
    return "\n".join(lines)


def main() -> int:
    """Measure what the record lacks, then print its tables."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # a run that is ended stops its servers
    files, origin = pictures.ensure()
    about: dict[str, Any] = {"pictures": origin, "connections": arguments.connections}
    if arguments.avx2:
        about["settings"] = {"PEER_DTYPE": "float32", "VIT_DTYPE": "float32"}
        os.environ |= _AVX2
    record = Record(arguments.record, dtype="float32" if arguments.avx2 else "bfloat16", about=about)
    for server in SERVERS:
        try:
            record.section("servers")[server.name] = server.version()
        except ServerFailed as error:
            print(error, file=sys.stderr)
    for name in arguments.models:
        comparison = Comparison(record, name, files, arguments)
        for phase in arguments.phases:
            try:
                getattr(comparison, phase)()
            except subprocess.CalledProcessError as error:
                print(f"{name}, {phase}: {error}", file=sys.stderr)
    print(report(record.data))
    return 0


def _arguments() -> argparse.Namespace:
    phases = ("tune", "rounds", "pace")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("phases", nargs="*", metavar="PHASE", default=list(phases), help=", ".join(phases))
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--servers", nargs="+", choices=[server.name for server in SERVERS])
    parser.add_argument("--engines", nargs="+", default=["torch", "openvino"], choices=_ENGINES)
    parser.add_argument("--avx2", action="store_true", help="float32, and no library beyond AVX2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    parser.add_argument("--tune-seconds", type=float, default=3)
    parser.add_argument("--warm-seconds", type=float, default=20)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--record", type=Path, default=RESULTS / "peers.json")
    arguments = parser.parse_args()
    if unknown := set(arguments.phases) - set(phases):
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(phases)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
