"""vitserve beside its peers: `python -m benchmarks.peers`. Ratios of one run, medians over interleaved rounds.

    tune    every server with each of its candidate configurations, once; the fastest is kept
    rounds  every server in turn, several times over: closed loop by wrk
    pace    half of the best peer's rate as an open loop: the tail that a caller sees
    report  no measurement: print the tables of a record

Servers are started before the first of them is measured, and all but the one that is loaded are held (SIGSTOP): some
poll while they are idle. Every measurement is saved as soon as it is made; the same command goes on where the record
stops.
"""

from __future__ import annotations

import argparse
import json
import os
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
from benchmarks.peers.report import COMPILED, OPENVINO, is_peer, report
from benchmarks.record import RESULTS, Record, medians, one_of
from benchmarks.servers import PEERS, SERVERS, VITSERVE, Config, Running, Server, ServerFailed, ask, running

_PHASES = ("tune", "rounds", "pace")
_STABLE = 0.05
_MARGIN = 0.02

Row = tuple[str, Server, Config]
"""What has a line in the table: its name, the server and its configuration."""

Started = dict[int, tuple[Running, Loader]]
"""Servers that are up, and the load for each, by their position among the rows."""


_AVX2: dict[str, str] = {"PEER_DTYPE": "float32", "VIT_DTYPE": "float32"}
"""What all servers get where oneDNN, and what of OpenVINO is made of it, may use no instructions beyond AVX2."""


def main() -> int:
    """Measure what the record lacks, then print its tables."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    about: dict[str, Any] = {"pictures": origin, "connections": arguments.connections}
    if arguments.avx2:
        about["settings"] = _AVX2
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    record = Record(arguments.record, dtype="float32" if arguments.avx2 else "bfloat16", about=about)
    if arguments.phases != ["report"]:
        chosen = _chosen(arguments, record)
        for name in arguments.models:
            comparison = Comparison(record, name, files, arguments, chosen)
            for phase in _PHASES:
                if phase in arguments.phases:
                    getattr(comparison, phase)()
    print(report(record.data))
    return 0


class Comparison:
    """All measurements of one model."""

    def __init__(
        self,
        record: Record,
        model: str,
        files: Sequence[Path],
        arguments: argparse.Namespace,
        servers: Sequence[Server],
    ) -> None:
        self._record = record
        self._arguments = arguments
        self._files = files
        self._first = files[0].read_bytes()
        self._servers = servers
        self._model, origin = checkpoints.ensure(model)
        self._section = record.section("models", model)
        self._section["weights"] = origin
        graph.ensure(self._model)

    def tune(self) -> None:
        """Try each candidate; keep the fastest that refused and lost nothing."""
        untried = []
        for server in self._servers:
            if server is VITSERVE:
                continue
            for name, candidates in ((server.name, server.candidates), (server.name + OPENVINO, server.openvino)):
                tried = self._of("tune", name, [])
                configs = [trial["config"] for trial in tried]
                untried += [(name, server, config) for config in candidates if config not in configs]
        size = self._arguments.together
        for start in range(0, len(untried), size):
            self._try(untried[start : start + size])

    def _try(self, rows: Sequence[Row]) -> None:
        with self.started(rows) as (started, failed):
            for number, reason in failed.items():
                name, _, config = rows[number]
                self._of("tune", name, []).append({"config": dict(config), "failed": reason.splitlines()[-1][:300]})
            self.trials(rows, started)

    def trials(self, rows: Sequence[Row], started: Started) -> None:
        """One short measurement of each."""
        for number, (running_, load) in started.items():
            name, _, config = rows[number]
            found = self._load(running_, load, self._arguments.tune_seconds)
            self._of("tune", name, []).append({"config": dict(config), **found.as_json()})
            _tell("tune", name, found, config)
            self._record.save()

    def rounds(self) -> None:
        """Peak rate and its latencies, each server in turn."""
        rows = [row for row in self._rows() if len(self._of("rounds", row[0], [])) < self._arguments.rounds]
        rows = [row for row in rows if row[0] not in self._failed()]
        with self.started(rows) as (started, failed):
            for number, reason in failed.items():
                self._failed()[rows[number][0]] = reason[-500:]
            for number, (running_, _) in started.items():
                name, server, config = rows[number]
                with running_.thawed():
                    self._check(name, server, running_)
                self._of("configs", name, dict(config))
            for turn in range(self._arguments.rounds):
                self.turn(turn, rows, started)

    def turn(self, turn: int, rows: Sequence[Row], started: Started) -> None:
        """One round; the limit in C++ is measured once, after the first."""
        for number, (running_, load) in started.items():
            name = rows[number][0]
            done = self._of("rounds", name, [])
            if len(done) <= turn:
                with running_.thawed():
                    self._warm(running_, load)
                    before = running_.processor_seconds()
                    found = load.closed(
                        running_.url, connections=self._arguments.connections, seconds=self._arguments.seconds
                    )
                    spent = running_.processor_seconds() - before
                # wrk counts answers for a whole number of seconds.
                answered = found.rate * max(1, round(self._arguments.seconds))
                more = {"start_seconds": round(running_.start_seconds, 2), "cpu_ms": round(1000 * spent / answered, 3)}
                done.append(found.as_json() | more)
                _tell(f"round {turn + 1}", name, found, {})
                self._record.save()
        if "limit" not in self._section and (PEERS / "opencv").exists():
            limit = self._section["limit"] = self._limit()
            print(f"in-process: {limit['rate']}/s", flush=True)
            self._record.save()

    def _limit(self) -> dict[str, Any]:
        """What OpenCV and OpenVINO do in a process of their own without HTTP; see `limit.py`."""
        command = [PEERS / "opencv" / "bin" / "python", "-m", "benchmarks.peers.limit", self._model]
        command += ["--dtype", self._record.data["dtype"], "--seconds", str(self._arguments.seconds), *self._files]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def pace(self) -> None:
        """Latencies at half of the best peer's rate, the same requests at the same moments for all."""
        peak = {name: medians(done)["rate"] for name, done in self._section.get("rounds", {}).items() if done}
        best = max((rate for name, rate in peak.items() if is_peer(name)), default=0.0)
        rate = self._section.setdefault("pace_rate", round(best / 2, 1))
        # A server that is slower than the pace only shows how long its queue grew.
        rows = [row for row in self._rows() if best and peak.get(row[0], 0) > rate]
        rows = [row for row in rows if not self._of("pace", row[0], [])]
        with self.started(rows) as (started, failed):
            for reason in failed.values():
                print(reason, file=sys.stderr)
            self.paces(rate, rows, started)

    def paces(self, rate: float, rows: Sequence[Row], started: Started) -> None:
        """The open loop, once for each server."""
        for number, (running_, load) in started.items():
            name = rows[number][0]
            with running_.thawed():
                self._warm(running_, load)
                found = load.open(running_.url, rate=rate, seconds=2 * self._arguments.seconds)
            self._of("pace", name, []).append(found.as_json())
            _tell("pace", name, found, {})
            self._record.save()

    def _rows(self) -> list[Row]:
        """Who is measured: each peer at its best with each engine, ours in each candidate."""
        rows: list[Row] = []
        for server in self._servers:
            if server is VITSERVE:
                for config in server.candidates:
                    name = ", ".join([server.name, *(f"`{key}={value}`" for key, value in config.items())])
                    rows.append((name, server, config))
                continue
            best = self._best(server.name, server.candidates)
            rows.append((server.name, server, best))
            if self._arguments.compiled:
                rows.append((server.name + COMPILED, server, {**best, "PEER_ENGINE": "compile"}))
            if server.openvino:
                rows.append((server.name + OPENVINO, server, self._best(server.name + OPENVINO, server.openvino)))
        if self._arguments.rows:
            rows = [row for row in rows if row[0] in self._arguments.rows]
        return rows

    def _best(self, name: str, candidates: Sequence[Config]) -> Config:
        return best_config(self._of("tune", name, [])) or candidates[0]

    @contextmanager
    def started(self, rows: Sequence[Row]) -> Iterator[tuple[Started, dict[int, str]]]:
        """Start the servers; give those that run, by their number among the rows, and why others do not."""
        with ExitStack() as stack:
            started: Started = {}
            failed: dict[int, str] = {}
            for number, (name, server, config) in enumerate(rows):
                settings = {**config, **self._record.data.get("settings", {})}
                # Ours is not held: it polls nothing, and its watchdog ends a process that has stood still.
                held = server is not VITSERVE
                try:
                    running_ = stack.enter_context(
                        running(server, self._model, settings, picture=self._first, held=held)
                    )
                except ServerFailed as error:
                    failed[number] = str(error)
                    print(f"{name}: {error}", file=sys.stderr)
                else:
                    started[number] = (running_, stack.enter_context(loader(self._files, server.protocol)))
            yield started, failed

    def _load(self, started: Running, load: Loader, seconds: float) -> Load:
        """Warm a server and load it as much as it bears."""
        with started.thawed():
            self._warm(started, load)
            return load.closed(started.url, connections=self._arguments.connections, seconds=seconds)

    def _warm(self, started: Running, load: Loader) -> None:
        """Load it until two runs in a row agree, or the time for that is up."""
        deadline = time.monotonic() + self._arguments.warm_seconds
        before = 0.0
        while time.monotonic() < deadline:
            rate = load.closed(started.url, connections=self._arguments.connections, seconds=1).rate
            if before and abs(rate - before) <= _STABLE * before:
                return
            before = rate

    def _of(self, phase: str, name: str, default: Any) -> Any:
        return self._section.setdefault(phase, {}).setdefault(name, default)

    def _failed(self) -> dict[str, str]:
        return self._section.setdefault("failed", {})  # type: ignore[no-any-return]

    def _check(self, name: str, server: Server, started: Running) -> None:
        """Top-1 over HTTP against float32 in this process, where that is decided by more than the margin."""
        expected = self._section.get("expected")
        if expected is None:
            expected = self._section["expected"] = _reference(self._model, self._files)
        answers = [ask(started.url, server.protocol, file.read_bytes()) for file in self._files]
        pairs = list(zip(expected, answers, strict=True))
        self._of(
            "top1",
            name,
            {
                "same": sum(one["index"] == answer for one, answer in pairs),
                "same_above_margin": sum(one["index"] == answer for one, answer in pairs if one["margin"] > _MARGIN),
                "above_margin": sum(one["margin"] > _MARGIN for one in expected),
                "pictures": len(pairs),
            },
        )


def best_config(tried: Sequence[Mapping[str, Any]]) -> Config | None:
    """The configuration of the fastest trial; one that refused or lost requests only if all did."""
    whole = [trial for trial in tried if "rate" in trial]
    clean = [trial for trial in whole if not trial["refused"] and not trial["broken"]]
    if not whole:
        return None
    best: Config = max(clean or whole, key=lambda trial: trial["rate"])["config"]
    return best


def _reference(model: Path, files: Sequence[Path]) -> list[dict[str, float]]:
    options = Options(model, 0, 2, 1, batch=1, wait_ms=0, dtype="float32", engine="torch", streams=1, workers=1)
    decode, classifier = Decoder(model), TorchClassifier(options)
    rows = np.concatenate([classifier.probabilities([decode(file.read_bytes())]) for file in files])
    first, second = np.sort(rows, axis=1)[:, -1], np.sort(rows, axis=1)[:, -2]
    return [
        {"index": int(row.argmax()), "margin": round(float(a - b), 4)}
        for row, a, b in zip(rows, first, second, strict=True)
    ]


def _chosen(arguments: argparse.Namespace, record: Record) -> list[Server]:
    """Servers that are asked for and installed."""
    chosen = []
    for server in SERVERS:
        if arguments.servers and not any(part.lower() in server.name.lower() for part in arguments.servers):
            continue
        try:
            record.section("servers")[server.name] = server.version()
        except ServerFailed as error:
            record.section("not_installed")[server.name] = str(error)
            print(error, file=sys.stderr)
        else:
            record.section("not_installed").pop(server.name, None)
            chosen.append(server)
    return chosen


def _tell(phase: str, name: str, load: Load, config: Mapping[str, str]) -> None:
    lost = f"  {load.refused} refused, {load.broken} broken" if load.refused or load.broken else ""
    settings = " ".join(f"{key.removeprefix('PEER_').removeprefix('VIT_')}={value}" for key, value in config.items())
    print(
        f"{phase:8} {name:28} {load.rate:7.1f}/s  p50 {load.p50:7.1f} ms  p99 {load.p99:7.1f} ms{lost}  {settings}",
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE", type=one_of(*_PHASES, "report"), help=f"default: {' '.join(_PHASES)}"
    )
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--servers", nargs="+", help="parts of names (default: all that are installed)")
    parser.add_argument("--rows", nargs="+", help="names of rows, as in the table (default: all of the servers)")
    parser.add_argument("--compiled", action="store_true", help="peers with torch.compile, too, in rows of their own")
    parser.add_argument("--avx2", action="store_true", help="float32, and oneDNN held to AVX2")
    parser.add_argument("--together", type=int, default=16, help="servers that are up at once while they are tuned")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--tune-seconds", type=float, default=2, help="of each trial of a configuration")
    parser.add_argument("--warm-seconds", type=float, default=2, help="at most, before each measurement")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--record", type=Path, default=RESULTS / "peers-cpu.json")
    arguments = parser.parse_args()
    arguments.phases = arguments.phases or list(_PHASES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
