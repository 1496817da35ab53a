"""vitserve beside its peers: `python -m benchmarks.peers`. Ratios within slices, medians over interleaved rounds.

    tune    every server with each of its candidate configurations, once; the fastest is kept
    rounds  every server in turn, several times over: closed loop by wrk
    pace    half of the best peer's rate as an open loop: the tail that a caller sees
    report  no measurement: print the tables of a record

Servers are started and warmed before the first of them is measured, and all but the one that is loaded are held
(SIGSTOP): some poll while they are idle. Every measurement is saved as soon as it is made; the same command goes on
where the record stops. Each turn of `rounds` is a slice of the record and begins with vitserve, so that servers
measured at different times are compared by what vitserve did beside them. `--slice` waits for Enter before it measures.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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
_ENGINES = {"torch": "", "compile": COMPILED, "openvino": OPENVINO}
_STABLE = 0.05
_MARGIN = 0.02
_BETWEEN = 1.9
"""Seconds that a measurement takes beside its own: one to warm up, the rest to begin and end."""

_STARTS = {"compile": 400}
"""Seconds until a server must be ready, where 120 are too few: for torch.compile while others use the machine."""

Row = tuple[str, Server, Config]
"""What has a line in the table: its name, the server and its configuration."""

Started = dict[int, tuple[Running, Loader]]
"""Servers that are up, and the load for each, by their position among the rows."""


_AVX2: dict[str, str] = {"PEER_DTYPE": "float32", "VIT_DTYPE": "float32"}
"""What all servers get where no library may use instructions beyond AVX2."""

_AVX2_LIBRARIES = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""For oneDNN (and what of OpenVINO is made of it), torch's own kernels, and its products in float32."""


def main() -> int:
    """Measure what the record lacks, then print its tables."""
    arguments = _arguments()
    # A run that is ended stops its servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    files, origin = pictures.ensure()
    about: dict[str, Any] = {"pictures": origin, "connections": arguments.connections}
    if arguments.avx2:
        about["settings"] = _AVX2
        os.environ |= _AVX2_LIBRARIES
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
        self._slice_end = 0.0
        graph.ensure(self._model)

    def tune(self) -> None:
        """Try each candidate; keep the fastest that refused and lost nothing."""
        untried: list[Row] = []
        for name, server, candidates in self._candidates():
            tried = [trial["config"] for trial in self._of("tune", name, [])]
            untried += [(name, server, config) for config in candidates if config not in tried]
        for start in range(0, len(untried), self._arguments.together):
            rows = untried[start : start + self._arguments.together]
            with self._started(rows) as (started, failed):
                for number, reason in failed.items():
                    name, _, config = rows[number]
                    self._of("tune", name, []).append({"config": dict(config), "failed": reason.splitlines()[-1][:300]})
                self._await_slice(started, self._arguments.tune_seconds)
                for number, running_and_load in started.items():
                    name, _, config = rows[number]
                    try:
                        found, _ = self._closed(*running_and_load, self._arguments.tune_seconds)
                    except subprocess.CalledProcessError as error:
                        print(f"{name}: {error}", file=sys.stderr)
                        continue
                    self._of("tune", name, []).append({"config": dict(config), **found.as_json()})
                    self._tell("tune", name, found, config)
                self._end_slice()

    def rounds(self) -> None:
        """Peak rate and its latencies, each server in turn and ours in every turn."""
        rows = [row for row in self._rows() if len(self._of("rounds", row[0], [])) < self._arguments.rounds]
        if not rows:
            return
        if rows[0][0] != VITSERVE.name:
            rows.insert(0, (VITSERVE.name, VITSERVE, VITSERVE.candidates[0]))
        with self._started(rows) as (started, failed):
            failures = self._section["failed"] = {rows[number][0]: reason[-500:] for number, reason in failed.items()}
            if VITSERVE.name in failures:
                raise ServerFailed(failures[VITSERVE.name])
            for number, (running_, _) in started.items():
                name, server, config = rows[number]
                with running_.thawed():
                    self._check(name, server, running_)
                self._of("configs", name, dict(config))
            while any(len(self._of("rounds", rows[number][0], [])) < self._arguments.rounds for number in started):
                self._await_slice(started, self._arguments.seconds)
                self._turn(rows, started)
            self._end_slice()

    def _turn(self, rows: Sequence[Row], started: Started) -> None:
        """One round of all that lack one, after ours; the limit in C++ is measured once, after the first."""
        self._section["slices"] = slice_ = self._section.get("slices", 0) + 1
        for number, (running_, load) in list(started.items()):
            name = rows[number][0]
            done = self._of("rounds", name, [])
            if len(done) < self._arguments.rounds or name == VITSERVE.name:
                try:
                    found, spent = self._closed(running_, load, self._arguments.seconds)
                except subprocess.CalledProcessError as error:
                    if name == VITSERVE.name:
                        raise
                    del started[number]
                    self._of("failed", name, str(error))
                    continue
                # wrk counts answers for a whole number of seconds.
                answered = found.rate * max(1, round(self._arguments.seconds))
                more = {"start_seconds": round(running_.start_seconds, 2), "cpu_ms": round(1000 * spent / answered, 3)}
                done.append(found.as_json() | more | {"slice": slice_})
                self._tell(f"slice {slice_}", name, found, {})
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
        rates = [rate for name, rate in peak.items() if is_peer(name)]
        if not rates:
            return
        rate = self._section.setdefault("pace_rate", round(max(rates) / 2, 1))
        # A server that is slower than the pace only shows how long its queue grew.
        rows = [row for row in self._rows() if peak.get(row[0], 0) > rate]
        rows = [row for row in rows if not self._of("pace", row[0], [])]
        with self._started(rows) as (started, _):
            self._await_slice(started, 2 * self._arguments.seconds)
            for number, (running_, load) in started.items():
                name = rows[number][0]
                with running_.thawed():
                    self._second(running_, load)
                    found = load.open(running_.url, rate=rate, seconds=2 * self._arguments.seconds)
                self._of("pace", name, []).append(found.as_json())
                self._tell("pace", name, found, {})
            self._end_slice()

    def _candidates(self) -> Iterator[tuple[str, Server, Sequence[Config]]]:
        """The peers with each engine that is asked for but torch.compile, which has the configuration of torch."""
        for server in self._servers:
            if server is not VITSERVE:
                for engine, candidates in (("torch", server.candidates), ("openvino", server.openvino)):
                    if engine in self._arguments.engines:
                        yield server.name + _ENGINES[engine], server, candidates

    def _rows(self) -> list[Row]:
        """Who is measured: ours in each candidate, each peer at its best with each engine."""
        rows: list[Row] = []
        for server in self._servers:
            if server is VITSERVE:
                for config in server.candidates:
                    name = ", ".join([server.name, *(f"`{key}={value}`" for key, value in config.items())])
                    rows.append((name, server, config))
                continue
            best = {"torch": self._best(server.name, server.candidates)}
            best["compile"] = {**best["torch"], "PEER_ENGINE": "compile"}
            best["openvino"] = self._best(server.name + OPENVINO, server.openvino)
            rows += [(server.name + _ENGINES[engine], server, best[engine]) for engine in self._arguments.engines]
        if self._arguments.rows:
            rows = [row for row in rows if row[0] in self._arguments.rows]
        return rows

    def _best(self, name: str, candidates: Sequence[Config]) -> Config:
        return best_config(self._of("tune", name, [])) or candidates[0]

    @contextmanager
    def _started(self, rows: Sequence[Row]) -> Iterator[tuple[Started, dict[int, str]]]:
        """Start and warm the servers; give those that run, by their number among the rows, and why others do not."""
        with ExitStack() as stack:
            started: Started = {}
            failed: dict[int, str] = {}
            for number, (name, server, config) in enumerate(rows):
                settings = {**config, **self._record.data.get("settings", {})}
                timeout = _STARTS.get(config.get("PEER_ENGINE", "torch"), 120)
                server_of = running(
                    server, self._model, settings, picture=self._first, timeout=timeout, held=server.held
                )
                try:
                    running_ = stack.enter_context(server_of)
                except ServerFailed as error:
                    failed[number] = str(error)
                    print(f"{name}: {error}", file=sys.stderr)
                else:
                    load = stack.enter_context(loader(self._files, server.protocol))
                    with running_.thawed():
                        self._warm(running_, load)
                    started[number] = (running_, load)
            yield started, failed

    def _closed(self, started: Running, load: Loader, seconds: float) -> tuple[Load, float]:
        """Load a server as much as it bears; also give the processor time it took."""
        with started.thawed():
            self._second(started, load)
            before = started.processor_seconds()
            found = load.closed(started.url, connections=self._arguments.connections, seconds=seconds)
            return found, started.processor_seconds() - before

    def _second(self, started: Running, load: Loader) -> float:
        """A second of load that is not counted; its rate."""
        return load.closed(started.url, connections=self._arguments.connections, seconds=1).rate

    def _warm(self, started: Running, load: Loader) -> None:
        """Load it until two seconds in a row agree, or the time for that is up."""
        deadline = time.monotonic() + self._arguments.warm_seconds
        before = 0.0
        while time.monotonic() < deadline:
            rate = self._second(started, load)
            if before and abs(rate - before) <= _STABLE * before:
                return
            before = rate

    def _await_slice(self, started: Started, seconds: float) -> None:
        """Wait for Enter, with `--slice`, unless a measurement of each still fits into the slice that has begun."""
        needed = len(started) * (seconds + _BETWEEN)
        if self._arguments.slice and time.monotonic() + needed > self._slice_end:
            input(f"slice: ready; {needed:.0f} s of measurements are next: Enter begins\n")
            self._slice_end = time.monotonic() + self._arguments.slice
            for running_, _ in started.values():
                running_.hold()

    def _end_slice(self) -> None:
        """Say that the machine need not be quiet any longer."""
        if self._arguments.slice:
            print("slice: over", flush=True)
            self._slice_end = 0.0

    def _tell(self, phase: str, name: str, load: Load, config: Config) -> None:
        """Save the record and print a line."""
        self._record.save()
        lost = f"  {load.refused} refused, {load.broken} broken" if load.refused or load.broken else ""
        settings = " ".join(f"{key.removeprefix('PEER_')}={value}" for key, value in config.items())
        numbers = f"{load.rate:7.1f}/s  p50 {load.p50:7.1f} ms  p99 {load.p99:7.1f} ms"
        print(f"{phase:8} {name:28} {numbers}{lost}  {settings}", flush=True)

    def _of(self, phase: str, name: str, default: Any) -> Any:
        return self._section.setdefault(phase, {}).setdefault(name, default)

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
        asked = any(part.lower() in server.name.lower() for part in arguments.servers or [server.name])
        if server is not VITSERVE and not asked:
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE", type=one_of(*_PHASES, "report"), help=f"default: {' '.join(_PHASES)}"
    )
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--servers", nargs="+", help="parts of names of peers (default: all that are installed)")
    parser.add_argument("--rows", nargs="+", help="names of rows, as in the table (default: all of the servers)")
    parser.add_argument("--engines", nargs="+", default=["torch", "openvino"], choices=list(_ENGINES), help="of peers")
    parser.add_argument("--avx2", action="store_true", help="float32, and all libraries held to AVX2")
    parser.add_argument("--together", type=int, default=16, help="servers that are up at once while they are tuned")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4, help="of each measurement")
    parser.add_argument("--tune-seconds", type=float, default=2, help="of each trial of a configuration")
    parser.add_argument("--warm-seconds", type=float, default=2, help="at most, once a server has started")
    parser.add_argument("--slice", type=float, help="seconds to measure at a time: wait for Enter before each slice")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--record", type=Path, default=RESULTS / "peers.json")
    arguments = parser.parse_args()
    arguments.phases = arguments.phases or list(_PHASES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
