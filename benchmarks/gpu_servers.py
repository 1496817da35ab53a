"""The steps of the GPU benchmark that start servers; see `benchmarks.gpu`."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import gpu_machine
from benchmarks.gpu_bench import Bench, read
from benchmarks.gpu_decoding import decode_rate
from benchmarks.load import Load
from benchmarks.loadgen import Plan, load
from benchmarks.record import table
from benchmarks.servers import OURS, VITSERVE, Running, ServerFailed, ask, running

_SHARE, _RATE, _START_SECONDS = 0.85, 5_000, 15
_PATIENCE = 120
"""Seconds in which a service that lost its engine has to answer again."""

_FILL = """
import sys, time, torch
held = []
if torch.cuda.is_available():
    try:
        while True:
            held.append(torch.empty(64 << 20, dtype=torch.uint8, device=sys.argv[1]))
    except torch.OutOfMemoryError:
        pass
print(len(held) * 64, flush=True)
sys.stdin.read()
"""
"""Takes the device's memory in pieces of 64 MiB, says how many MiB it has, and holds them until its input ends."""


def http(bench: Bench) -> None:
    """Each number of workers; then, with the best, rounds of decoding alone, the engine alone and HTTP."""
    variant, batch = bench.best_of_ours()
    section = bench.record.section("http")
    tried = section.setdefault("workers", {})
    for workers in bench.arguments.workers if len(bench.arguments.workers) > 1 else ():
        with _server(bench, workers, variant, batch) as server:
            bench.note(tried, str(workers), _closed(bench, server, bench.arguments.connections).as_json())
    workers = _best_workers(bench)
    rounds: list[dict[str, Any]] = []
    ours = bench.ours(variant, [batch])
    with _server(bench, workers, variant, batch) as server, gpu_machine.meter(bench.gpu) as state:
        for _ in range(bench.arguments.rounds):
            decode = decode_rate(read(bench.files), ours.checkpoint.preprocess, bench.seconds)
            engine = ours.rate(batch, bench.seconds)
            found = _closed(bench, server, bench.arguments.connections)
            share = round(found.rate / min(decode, engine), 3)
            measured = {"decode": round(decode, 1), "engine": round(engine, 1), "share": share}
            rounds.append(measured | {"http": found.as_json()})
            bench.note(section, "rounds", rounds)
    section |= {
        "settings": {"workers": workers, "variant": variant, "max_batch": batch},
        "connections": bench.arguments.connections,
        "load_processes": bench.arguments.load_processes,
        "rate": statistics.median(r["http"]["rate"] for r in rounds),
        "decode_rate": statistics.median(r["decode"] for r in rounds),
        "engine_rate": statistics.median(r["engine"] for r in rounds),
        "share": round(statistics.median(r["share"] for r in rounds), 3),
        "machine": state,
    }
    names = ("rate", "decode_rate", "engine_rate", "share")
    print(table(["http", "images/s or share"], [(name, section[name]) for name in names]), flush=True)
    bench.mark("HTTP / the smaller of decoding and engine", section["share"], _SHARE)
    bench.mark("HTTP, images/s (the aim)", section["rate"], _RATE)


def latency(bench: Bench) -> None:
    """In-process and over HTTP; the full rate is measured here, so that the step stands alone."""
    variant, batch = bench.best_of_ours()
    section = bench.record.section("latency")
    bench.note(section, "engine, batch 1", bench.ours(variant, [batch]).latency(bench.seconds))
    bench.note(section, "reference, batch 1", bench.reference().call("latency", bench.seconds))
    with _server(bench, _best_workers(bench), variant, batch) as server:
        bench.note(section, "HTTP, one at a time", _closed(bench, server, 1).as_json())
        full = _closed(bench, server, bench.arguments.connections)
        bench.note(section, "HTTP, full", full.as_json())
        if not full.rate:
            raise RuntimeError(f"the server answered nothing within {bench.seconds:g} s: {full}")
        for share in (0.5, 0.9):
            wanted = share * full.rate
            plan = Plan(server.url, OURS, read(bench.files), bench.seconds, rate=wanted)
            found = load(plan, processes=bench.arguments.load_processes)
            # A generator that is late itself would be measured instead of the server.
            kept = {"wanted": round(wanted, 1), "kept_up": found.rate > 0.95 * wanted}
            bench.note(section, f"HTTP, {share:.0%} load", found.as_json() | kept)


def start(bench: Bench) -> None:
    """The same start twice, with a compile cache of its own that is empty the first time."""
    bench.release()
    variant, _ = bench.best_of_ours()
    section = bench.record.section("start")
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        for name in ("cold", "warm"):
            with _server(bench, 1, variant, None, environment) as server:
                bench.note(section, f"{name}_seconds", round(server.answer_seconds, 1))
                bench.note(section, f"{name}_seconds_compiled", round(server.start_seconds, 1))
    bench.mark("seconds to ready, warm compile cache", section["warm_seconds"], _START_SECONDS, at_most=True)


def faults(bench: Bench) -> None:
    """An engine that is killed; the metrics; a second process that takes what memory is left."""
    bench.close()  # their memory is not what is to be taken
    variant, batch = bench.best_of_ours()
    section = bench.record.section("faults")
    picture = bench.files[0].read_bytes()
    with _server(bench, max(2, _best_workers(bench)), variant, batch) as server:
        os.kill(_engine(server), signal.SIGKILL)
        bench.note(section, "seconds to an answer after kill -9 of the engine", _answers_again(server, picture))
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        shown = [line for line in lines if line.startswith(("vit_gpu_", "vit_engine_"))]
        bench.note(section, "metrics", shown)
        command = [sys.executable, "-c", _FILL, bench.arguments.device]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as filler:
            assert filler.stdout is not None
            bench.note(section, "MiB taken by a second process", int(filler.stdout.readline() or -1))
            full = _closed(bench, server, bench.arguments.connections)
            bench.note(section, "HTTP while the memory is full", full.as_json())
            if bench.gpu is not None:
                bench.note(section, "a start while the memory is full", _refused_start(bench, variant, batch))
        bench.note(section, "seconds to an answer afterwards", _answers_again(server, picture))
        bench.note(section, "log", server.log[-4000:])
    if full.broken:
        raise RuntimeError(f"{full.broken} requests broke while the memory was full")


def _refused_start(bench: Bench, variant: str, batch: int) -> str:
    """Return what a server says that finds no memory; that it starts all the same is an answer too."""
    try:
        with _server(bench, 1, variant, batch) as server:
            return f"it started in {server.start_seconds:.1f} s: {server.log[-2000:]}"
    except ServerFailed as error:
        return str(error)[-2000:]


def _engine(server: Running) -> int:
    """Return the pid of the engine: of the processes that are not the supervisor, the one with torch in its memory."""
    for pid in server.pids():
        if pid != server.process.pid and "libtorch" in Path(f"/proc/{pid}/maps").read_text():
            return pid
    raise RuntimeError("no process of the server but the supervisor has loaded torch")


def _answers_again(server: Running, picture: bytes) -> float:
    began = time.monotonic()
    while time.monotonic() < began + _PATIENCE:
        try:
            ask(server.url, OURS, picture)
        except OSError:
            time.sleep(0.05)
        else:
            return round(time.monotonic() - began, 2)
    raise RuntimeError(f"no answer within {_PATIENCE} s: {server.log[-2000:]}")


def _best_workers(bench: Bench) -> int:
    tried = bench.record.section("http").get("workers", {})
    return int(max(tried, key=lambda name: float(tried[name]["rate"]))) if tried else bench.arguments.workers[0]


@contextmanager
def _server(
    bench: Bench, workers: int, variant: str, batch: int | None, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    arguments = bench.arguments
    config = {
        "VIT_DEVICE": arguments.device,
        "VIT_DTYPE": arguments.dtype,
        "VIT_COMPILE": variant,
        "VIT_WORKERS": str(workers),
        "VIT_DRAIN_DELAY": "0",
        "VIT_QUEUE_SIZE": str(max(256, 4 * arguments.connections)),
        **({} if batch is None else {"VIT_MAX_BATCH": str(batch)}),
        **dict(pair.split("=", 1) for pair in arguments.settings),
        **(environment or {}),
    }
    with running(VITSERVE, bench.folder, config, picture=bench.files[0].read_bytes(), timeout=900) as server:
        # Threads and allocators find their sizes.
        _closed(bench, server, arguments.connections, min(2, bench.seconds))
        yield server


def _closed(bench: Bench, server: Running, connections: int, seconds: float = 0) -> Load:
    plan = Plan(server.url, OURS, read(bench.files), seconds or bench.seconds, connections)
    return load(plan, processes=bench.arguments.load_processes)
