"""vitserve alone on this CPU: `python -m benchmarks.cpu`. Medians over interleaved rounds.

    limit        HTTP against the same work in-process, and a lone request against decoding plus computing
    attention    attention=true on every request against none
    relevance    attention=relevance on every request against none, with OpenVINO and with torch
    connections  throughput and latency with 1 to 512 connections
    workers      the same with 1 to 4 web workers
    memory       of each process, and whether it grows over many requests; seconds from start to ready

Every measurement is saved as soon as it is made; the same command goes on where the record stops.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import checkpoints, memory, pictures
from benchmarks.load import Protocol, loader
from benchmarks.record import RESULTS, Record, medians, one_of, table
from benchmarks.servers import OURS, OURS_ATTENTION, OURS_RELEVANCE, VITSERVE, ServerFailed, running

_CONNECTIONS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_WORKERS = (1, 2, 3, 4)
_STARTS = 3
_SECTIONS = ("limit", "attention", "relevance", "connections", "workers", "memory")


class Benchmark:
    """All measurements of one model (`bundled` is the one in the package)."""

    def __init__(self, record: Record, name: str, files: Sequence[Path], arguments: argparse.Namespace) -> None:
        self._record = record
        self._files = files
        self._first = files[0].read_bytes()
        self._arguments = arguments
        self._config: dict[str, str] = dict(pair.split("=", 1) for pair in arguments.settings)
        self._name = name
        self._section = record.section("models", name)
        if name == "bundled":
            self._model, origin = Path("bundled"), "bundled checkpoint"
        else:
            self._model, origin = checkpoints.ensure(name)
        self._section |= {"weights": origin, "settings": self._config}

    def limit(self) -> None:
        """HTTP and in-process in turn; each round is one pair."""
        rounds: list[dict[str, Any]] = self._section.setdefault("limit", [])
        while len(rounds) < self._arguments.rounds:
            inside = self._inprocess()
            with self._running() as server, loader(self._files, OURS) as load:
                self._warm(server.url, load)
                full = load.closed(server.url, connections=32, seconds=self._arguments.seconds)
                lone = load.closed(server.url, connections=1, seconds=self._arguments.seconds / 2)
            rounds.append(
                {
                    "inprocess": inside,
                    "http": full.as_json(),
                    "lone": lone.as_json(),
                    "ratio": round(full.rate / inside["rate"], 4),
                    "lone_extra_ms": round(lone.p50 - inside["lone_ms"], 3),
                }
            )
            self._saved("limit", rounds[-1]["ratio"])

    def attention(self) -> None:
        """With and without maps, in turn on one server."""
        self._maps("attention", OURS_ATTENTION)

    def relevance(self) -> None:
        """With and without relevance, in turn on one server of each backend."""
        for backend, how in (("openvino", "auto"), ("torch", "off")):
            self._maps(f"relevance-{backend}", OURS_RELEVANCE, VIT_COMPILE=how)

    def _maps(self, section: str, asking: Protocol, **settings: str) -> None:
        rounds: list[dict[str, Any]] = self._section.setdefault(section, [])
        if len(rounds) >= self._arguments.rounds:
            return
        with (
            self._running(**settings) as server,
            loader(self._files, OURS) as plain,
            loader(self._files, asking) as maps,
        ):
            self._warm(server.url, plain)
            self._warm(server.url, maps)
            while len(rounds) < self._arguments.rounds:
                # The order changes, so that a drift of the machine does not count for one side.
                pair = [(plain, "plain"), (maps, "attention")]
                measured: dict[str, Any] = {}
                for load, name in pair if len(rounds) % 2 == 0 else reversed(pair):
                    measured[name] = load.closed(server.url, connections=32, seconds=self._arguments.seconds).as_json()
                measured["ratio"] = round(measured["attention"]["rate"] / measured["plain"]["rate"], 4)
                rounds.append(measured)
                self._saved(section, measured["ratio"])

    def connections(self) -> None:
        """One server, ever more connections."""
        done: dict[str, Any] = self._section.setdefault("connections", {})
        if all(str(count) in done for count in _CONNECTIONS):
            return
        with self._running() as server, loader(self._files, OURS) as load:
            self._warm(server.url, load)
            for count in _CONNECTIONS:
                if str(count) not in done:
                    found = load.closed(server.url, connections=count, seconds=self._arguments.seconds)
                    done[str(count)] = found.as_json()
                    self._saved(f"{count} connections", found.rate)

    def workers(self) -> None:
        """Web workers, each with the load of 32 connections."""
        done: dict[str, Any] = self._section.setdefault("workers", {})
        for count in _WORKERS:
            if str(count) in done:
                continue
            try:
                with self._running(VIT_WORKERS=str(count)) as server, loader(self._files, OURS) as load:
                    self._warm(server.url, load)
                    found = load.closed(server.url, connections=32, seconds=self._arguments.seconds)
                    done[str(count)] = found.as_json() | {"processes": memory.processes(server.pids())}
                    self._saved(f"{count} workers", found.rate)
            except ServerFailed as error:
                print(f"{count} workers: {error}", file=sys.stderr)
                return

    def memory(self) -> None:
        """Start several times; then many requests, with the memory after each part of them."""
        found: dict[str, Any] = self._section.setdefault("memory", {})
        starts: list[float] = found.setdefault("start_seconds", [])
        while len(starts) < _STARTS:
            with self._running() as server:
                starts.append(round(server.start_seconds, 2))
            self._saved("start", starts[-1])
        if found.get("requests", 0) >= self._arguments.requests:
            return
        growth: list[list[float]] = []
        with self._running() as server, loader(self._files, OURS) as load:
            requests = 0
            found["ready_mib"] = memory.whole(server.pids())
            while requests < self._arguments.requests:
                part = load.closed(server.url, connections=32, seconds=10)
                requests += round(part.rate * 10)
                growth.append([requests, memory.whole(server.pids())])
            found["processes"] = memory.processes(server.pids())
        found |= {"requests": requests, "growth": growth}
        self._saved("memory MiB", growth[-1][1])

    def _running(self, **settings: str) -> Any:
        return running(VITSERVE, self._model, {**self._config, **settings}, picture=self._first)

    def _warm(self, url: str, load: Any) -> None:
        for _ in range(2):
            load.closed(url, connections=32, seconds=self._arguments.warm_seconds / 2)

    def _inprocess(self) -> dict[str, Any]:
        environment = os.environ | {"VIT_CHECKPOINT": str(self._model), "OMP_WAIT_POLICY": "PASSIVE"} | self._config
        command = [sys.executable, "-m", "benchmarks.inprocess", "--seconds", str(self._arguments.seconds)]
        command += ["--pictures", *map(str, self._files)]
        done = subprocess.run(command, cwd=checkpoints.REPOSITORY, env=environment, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def _saved(self, what: str, value: float) -> None:
        self._record.save()
        print(f"{self._name:8} {what:16} {value:.3f}", flush=True)


def report(data: dict[str, Any]) -> str:
    """The tables of a record, in Markdown."""
    device = data["device"]
    lines = [f"{device['cpu']}, {device['cores']} cores, load generator included; torch {data['versions']['torch']}."]
    sections: dict[str, Callable[[dict[str, Any]], str]] = {
        "limit": _limit_table,
        "attention": lambda model: _attention_table("attention=true", model["attention"]),
        "relevance-openvino": lambda model: _attention_table("relevance, OpenVINO", model["relevance-openvino"]),
        "relevance-torch": lambda model: _attention_table("relevance, torch", model["relevance-torch"]),
        "connections": lambda model: _load_table("connections", model["connections"]),
        "workers": lambda model: _load_table("web workers", model["workers"]),
        "memory": _memory_table,
    }
    for name, model in data.get("models", {}).items():
        lines += ["", f"### {name}: {model['weights']}"]
        lines += ["\n" + make(model) for section, make in sections.items() if model.get(section)]
    return "\n".join(lines)


def _limit_table(model: dict[str, Any]) -> str:
    rounds = model["limit"]
    inside = medians({key: value for key, value in one["inprocess"].items() if key != "compiled"} for one in rounds)
    http, lone = medians(one["http"] for one in rounds), medians(one["lone"] for one in rounds)
    ratio = medians({"ratio": one["ratio"], "extra": one["lone_extra_ms"]} for one in rounds)
    header = ("", "images/s", "lone request, p50 ms")
    rows = [
        ("over HTTP", http["rate"], lone["p50"]),
        ("in-process", inside["rate"], inside["lone_ms"]),
        ("ratio / difference", ratio["ratio"], ratio["extra"]),
        ("decoding alone", inside["decode_alone"], inside["lone_decode_ms"]),
        ("forward alone", inside["forward_alone"], None),
    ]
    return table(header, rows)


def _attention_table(name: str, rounds: list[dict[str, Any]]) -> str:
    plain, maps = medians(one["plain"] for one in rounds), medians(one["attention"] for one in rounds)
    ratio = medians({"ratio": one["ratio"]} for one in rounds)["ratio"]
    header = ("", "answered/s", "p50 ms", "p99 ms")
    rows = [(row, one["rate"], one["p50"], one["p99"]) for row, one in (("plain", plain), (name, maps))]
    return table(header, [*rows, ("ratio", ratio, None, None)])


def _load_table(title: str, done: dict[str, Any]) -> str:
    header = (title, "answered/s", "p50 ms", "p99 ms", "refused", "broken")
    rows = [(name, one["rate"], one["p50"], one["p99"], one["refused"], one["broken"]) for name, one in done.items()]
    return table(header, rows)


def _memory_table(model: dict[str, Any]) -> str:
    found = model["memory"]
    rows: list[tuple[object, ...]] = [("start to ready, s (median)", sorted(found["start_seconds"])[_STARTS // 2])]
    if "growth" in found:
        first, last = found["growth"][0], found["growth"][-1]
        rows += [
            ("whole service when ready, MiB", found["ready_mib"]),
            (f"after {first[0]} requests, MiB", first[1]),
            (f"after {last[0]} requests, MiB", last[1]),
        ]
    for count, one in model.get("workers", {}).items():
        free = [process["rss_mib"] for process in one.get("processes", []) if not process["torch"]]
        if free:
            rows.append((f"largest process without torch of {count} web workers, MiB", max(free)))
    return table(("", "value"), rows)


def main() -> int:
    """Measure what the record lacks, then print its tables."""
    arguments = _arguments()
    files, origin = pictures.ensure()
    record = Record(arguments.record, dtype="auto (bfloat16 where native)", about={"pictures": origin})
    if arguments.sections != ["report"]:
        for name in arguments.models:
            for section in ("limit", "attention", "relevance"):
                if section in arguments.sections:
                    getattr(Benchmark(record, name, files, arguments), section)()
        for name, section in (("vit32", "connections"), ("bundled", "workers"), ("bundled", "memory")):
            if section in arguments.sections:
                getattr(Benchmark(record, name, files, arguments), section)()
    print(report(record.data))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description=__doc__.splitlines()[0])
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", type=one_of(*_SECTIONS, "report"), help="default: all of them"
    )
    parser.add_argument("--models", nargs="+", default=list(checkpoints.SHAPES), choices=list(checkpoints.SHAPES))
    parser.add_argument("--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="other than the defaults")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of each measurement")
    parser.add_argument("--warm-seconds", type=float, default=4)
    parser.add_argument("--requests", type=int, default=20_000, help="over which memory must not grow")
    parser.add_argument("--record", type=Path, default=RESULTS / "cpu.json")
    arguments = parser.parse_args()
    arguments.sections = arguments.sections or list(_SECTIONS)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
