"""vitserve beside its peers: `python -m benchmarks.peers`. Ratios of one run, medians over interleaved rounds.

    tune    every server with each of its candidate configurations, once; the fastest is kept
    rounds  every server in turn, several times over: closed loop by wrk
    pace    half of the best peer's rate as an open loop, in turn again: the tail that a caller sees
    report  no measurement: print the tables of a record

Every measurement is saved as soon as it is made; the same command goes on where the record stops.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import checkpoints, pictures
from benchmarks.load import Load, Loader, loader
from benchmarks.peers.common import Classifier, Decoder, Options
from benchmarks.peers.report import COMPILED, is_peer, report
from benchmarks.record import RESULTS, Record, medians, one_of
from benchmarks.servers import SERVERS, VITSERVE, Config, Running, Server, ServerFailed, ask, running

_PHASES = ("tune", "rounds", "pace")
_STABLE = 0.05
_MARGIN = 0.02


def main() -> int:
    """Measure what the record lacks, then print its tables."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    about: dict[str, Any] = {"pictures": origin, "connections": arguments.connections}
    record = Record(arguments.record, dtype="bfloat16", about=about)
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

    def tune(self) -> None:
        """Try each candidate; keep the fastest that refused and lost nothing."""
        for server in self._servers:
            tried = self._of("tune", server.name, [])
            for config in server.candidates:
                if any(trial["config"] == config for trial in tried):
                    continue
                try:
                    with self._running(server, config) as (started, load):
                        _warm(started, load, self._arguments)
                        found = load.closed(
                            started.url, connections=self._arguments.connections, seconds=self._arguments.tune_seconds
                        )
                except ServerFailed as error:
                    tried.append({"config": dict(config), "failed": str(error).splitlines()[-1][:300]})
                else:
                    tried.append({"config": dict(config), **found.as_json()})
                    _tell("tune", server.name, found, dict(config))
                self._record.save()

    def rounds(self) -> None:
        """Peak rate and its latencies, each server in turn."""
        entries = self._entries()
        for turn in range(self._arguments.rounds):
            for name, server, config in entries:
                done = self._of("rounds", name, [])
                if len(done) > turn or name in self._failed():
                    continue
                try:
                    with self._running(server, config) as (started, load):
                        if not done:
                            self._check(name, server, started)
                        _warm(started, load, self._arguments)
                        found = load.closed(
                            started.url, connections=self._arguments.connections, seconds=self._arguments.seconds
                        )
                        done.append(found.as_json() | {"start_seconds": round(started.start_seconds, 2)})
                except ServerFailed as error:
                    self._failed()[name] = str(error)[-500:]
                    print(f"{name}: {error}", file=sys.stderr)
                else:
                    _tell(f"round {turn + 1}", name, found, {})
                self._of("configs", name, dict(config))
                self._record.save()

    def pace(self) -> None:
        """Latencies at half of the best peer's rate, the same requests at the same moments for all."""
        peak = {name: medians(done)["rate"] for name, done in self._section.get("rounds", {}).items() if done}
        best = max((rate for name, rate in peak.items() if is_peer(name)), default=0.0)
        if not best:
            return
        rate = self._section.setdefault("pace_rate", round(best / 2, 1))
        for turn in range(self._arguments.rounds):
            for name, server, config in self._entries():
                done = self._of("pace", name, [])
                # A server that is slower than the pace only shows how long its queue grew.
                if len(done) > turn or peak.get(name, 0) < rate:
                    continue
                try:
                    with self._running(server, config) as (started, load):
                        _warm(started, load, self._arguments)
                        found = load.open(started.url, rate=rate, seconds=self._arguments.seconds)
                except ServerFailed as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    continue
                done.append(found.as_json())
                _tell(f"pace {turn + 1}", name, found, {})
                self._record.save()

    def _entries(self) -> list[tuple[str, Server, Config]]:
        """Who is measured: peers in their best configuration, ours in its default and in its best."""
        entries: list[tuple[str, Server, Config]] = []
        for server in self._servers:
            best = best_config(self._of("tune", server.name, [])) or server.candidates[0]
            if server.name == VITSERVE.name:
                entries.append((server.name, server, {}))
                if best:
                    entries.append((f"{server.name}, tuned", server, best))
            else:
                entries.append((server.name, server, best))
                if self._arguments.compiled:
                    entries.append((f"{server.name}{COMPILED}", server, {**best, "PEER_COMPILE": "1"}))
        return entries

    def _running(self, server: Server, config: Config) -> _Session:
        return _Session(server, self._model, config, self._files, self._first)

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


class _Session:
    """A running server and the load for it, as one context."""

    def __init__(self, server: Server, model: Path, config: Config, files: Sequence[Path], first: bytes) -> None:
        self._running = running(server, model, config, picture=first)
        self._loader = loader(files, server.protocol)

    def __enter__(self) -> tuple[Running, Loader]:
        started = self._running.__enter__()
        return started, self._loader.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._loader.__exit__(*error)
        self._running.__exit__(*error)


def best_config(tried: Sequence[Mapping[str, Any]]) -> Config | None:
    """The configuration of the fastest trial; one that refused or lost requests only if all did."""
    whole = [trial for trial in tried if "rate" in trial]
    clean = [trial for trial in whole if not trial["refused"] and not trial["broken"]]
    if not whole:
        return None
    best: Config = max(clean or whole, key=lambda trial: trial["rate"])["config"]
    return best


def _warm(started: Running, load: Loader, arguments: argparse.Namespace) -> None:
    """Load it until two runs in a row agree, or the time for that is up."""
    deadline = time.monotonic() + arguments.warm_seconds
    before = 0.0
    while time.monotonic() < deadline:
        rate = load.closed(started.url, connections=arguments.connections, seconds=1).rate
        if before and abs(rate - before) <= _STABLE * before:
            return
        before = rate


def _reference(model: Path, files: Sequence[Path]) -> list[dict[str, float]]:
    options = Options(model, 0, threads=2, decoders=1, batch=1, wait_ms=0, dtype="float32", compile=False)
    decode, classifier = Decoder(model), Classifier(options)
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
        f"{phase:8} {name:18} {load.rate:7.1f}/s  p50 {load.p50:7.1f} ms  p99 {load.p99:7.1f} ms{lost}  {settings}",
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "phases", nargs="*", metavar="PHASE", type=one_of(*_PHASES, "report"), help=f"default: {' '.join(_PHASES)}"
    )
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--servers", nargs="+", help="parts of names (default: all that are installed)")
    parser.add_argument("--compiled", action="store_true", help="peers with torch.compile, too, in rows of their own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--tune-seconds", type=float, default=4, help="of each trial of a configuration")
    parser.add_argument("--warm-seconds", type=float, default=8, help="at most, before each measurement")
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--record", type=Path, default=RESULTS / "peers-cpu.json")
    arguments = parser.parse_args()
    arguments.phases = arguments.phases or list(_PHASES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
