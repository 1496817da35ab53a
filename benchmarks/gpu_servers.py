"""The steps of the GPU benchmark that start servers; see `benchmarks.gpu`."""

from __future__ import annotations

import asyncio
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
from benchmarks.checkpoints import REPOSITORY
from benchmarks.gpu_bench import SMOKE, Bench, read
from benchmarks.gpu_decoding import decode_rate
from benchmarks.load import Load
from benchmarks.loadgen import Plan, load
from benchmarks.record import table
from benchmarks.reliability.http_caller import HttpCaller
from benchmarks.reliability.traffic import Kind, Traffic, learn
from benchmarks.servers import OURS, VITSERVE, Running, ServerFailed, ask, running

_SHARE, _RATE, _P99 = 0.85, 4_000, 25
_COLD, _WARM = 60, 15
_NEARLY = 0.97
"""Share of the best rate for which a service takes a smaller batch, which waits less."""
_ANSWER = 12.0
"""Seconds after which a request counts as lost: the service promises an answer within ten."""
_MOST_TRAFFIC = 400.0
"""Requests a second while something is hurt: one process sends them and compares each answer."""

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

_FAULT = """
import os, signal, sys, threading

def hurt(torch):
    if not torch.cuda.is_initialized():
        os.abort()
    held = torch.zeros(1, device="cuda")
    print(held[torch.tensor([1 << 20], device="cuda")].cpu())

def begin(number, frame):
    if "torch" in sys.modules:
        threading.Thread(target=hurt, args=(sys.modules["torch"],)).start()

signal.signal(signal.SIGUSR2, begin)
"""
"""`sitecustomize.py` of a server: on SIGUSR2 an engine reads beyond a tensor on the GPU, after which every call of CUDA
in its process fails; on a CPU it aborts."""


def smoke(bench: Bench) -> None:
    """A tiny model: its scores beside float32's, compiled, and one answer over HTTP."""
    from benchmarks.gpu_engine import random_pictures  # noqa: PLC0415  torch takes seconds to import

    section = bench.record.section("tiny model")
    folder = bench.checkpoint_of(SMOKE)
    variant = bench.arguments.variants[0]
    ours = bench.ours(variant, [4], folder=folder)
    bench.note(section, "beside float32", ours.agreement(random_pictures(ours.checkpoint, 16)))
    bench.note(section, "images/s", round(ours.rate(4, 0.2), 1))
    bench.release()
    with _server(bench, 2, variant, 4, {"VIT_CHECKPOINT": str(folder)}, folder) as server:
        bench.note(section, "seconds to the first answer", round(server.answer_seconds, 1))
        bench.note(section, "HTTP", _closed(bench, server, 4, 0.3).as_json())


def http(bench: Bench) -> None:
    """Each number of workers; then, with the best, rounds of decoding alone and HTTP, and half of its rate."""
    variant, batch = bench.best_of_ours(_NEARLY)
    section = bench.record.section("http")
    tried = section.setdefault("workers", {})
    if len(bench.arguments.workers) > 1:
        for workers in bench.arguments.workers:
            if str(workers) not in tried:
                with _server(bench, workers, variant, batch) as server:
                    bench.note(tried, str(workers), _closed(bench, server, bench.arguments.connections).as_json())
    workers = _best_workers(bench)
    section["settings"] = {"workers": workers, "variant": variant, "max_batch": batch}
    section["load"] = {"connections": bench.arguments.connections, "processes": bench.arguments.load_processes}
    config = _preprocess(bench)
    rounds: list[dict[str, Any]] = []
    with _server(bench, workers, variant, batch) as server, gpu_machine.meter(bench.gpu) as state:
        for _ in range(bench.arguments.rounds):
            decode = decode_rate(read(bench.files), config, bench.seconds, patience=bench.left())
            found = _closed(bench, server, bench.arguments.connections)
            rounds.append({"decode": round(decode, 1), "http": found.as_json()})
            bench.note(section, "rounds", rounds)
            _tell_http(bench, section, rounds)
        if not section["rate"]:
            raise RuntimeError(f"the server answered nothing within {bench.seconds:g} s: {rounds}")
        half = _open(bench, server, section["rate"] / 2)
        bench.note(section, "half load", half)
        bench.mark("HTTP, p99 at half load, ms", half["p99"], _P99, at_most=True)
    section["machine"] = state


def _tell_http(bench: Bench, section: dict[str, Any], rounds: list[dict[str, Any]]) -> None:
    """Put the medians of the rounds into the record, and the marks."""
    section["rate"] = statistics.median(r["http"]["rate"] for r in rounds)
    section["decode_rate"] = statistics.median(r["decode"] for r in rounds)
    names = ["rate", "decode_rate"]
    rates = bench.record.section("engine").get("rates", {})
    if "ours" in rates:
        section["engine_rate"] = rates["ours"]
        names.append("engine_rate")
    section["share"] = round(section["rate"] / min(section[name] for name in names[1:]), 3)
    rows = [(name, section[name]) for name in [*names, "share"]]
    print(table(["http", "images/s or share"], rows), flush=True)
    cores = len(os.sched_getaffinity(0))
    bench.mark(f"JPEG over HTTP on {cores} cores, images/s", section["rate"], _RATE)
    bench.mark("HTTP / the smaller of decoding and engine", section["share"], _SHARE)


def latency(bench: Bench) -> None:
    """One picture at a time, and 90 % of the full rate over HTTP."""
    variant, batch = bench.best_of_ours(_NEARLY)
    section = bench.record.section("latency")
    bench.note(section, "engine, batch 1", bench.ours(variant, [batch]).latency(bench.seconds))
    bench.note(section, "reference, batch 1", bench.reference().call("latency", bench.seconds))
    bench.close()
    with _server(bench, _best_workers(bench), variant, batch) as server:
        bench.note(section, "HTTP, one at a time", _closed(bench, server, 1).as_json())
        rate = bench.record.section("http").get("rate")
        if rate is None:
            rate = _closed(bench, server, bench.arguments.connections).rate
        bench.note(section, "HTTP, 90% load", _open(bench, server, 0.9 * rate))


def start(bench: Bench) -> None:
    """The same start twice, with a compile cache of its own that is empty the first time."""
    variant, _ = bench.best_of_ours()
    section = bench.record.section("start")
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        for name, mark in (("cold", _COLD), ("warm", _WARM)):
            with _server(bench, 1, variant, None, environment) as server:
                bench.note(section, f"{name}_seconds", round(server.answer_seconds, 1))
                bench.note(section, f"{name}_seconds_compiled", round(server.start_seconds, 1))
            name_of_mark = f"seconds to ready, {name} compile cache"
            bench.mark(name_of_mark, section[f"{name}_seconds_compiled"], mark, at_most=True)


def faults(bench: Bench) -> None:
    """An engine that is killed and one whose GPU fails, under traffic; another process that takes the memory."""
    variant, batch = bench.best_of_ours(_NEARLY)
    section = bench.record.section("faults")
    picture = bench.files[0].read_bytes()
    fault = "a fault of the GPU" if bench.gpu is not None else "an abort in a GPU's place"
    lost = 0
    with tempfile.TemporaryDirectory(prefix="vitserve-bench-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_FAULT)
        path = os.pathsep.join(filter(None, (folder, str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        with _server(bench, max(2, _best_workers(bench)), variant, batch, {"PYTHONPATH": path}) as server:
            for name, number in (("kill -9 of the engine", signal.SIGKILL), (fault, signal.SIGUSR2)):
                outcomes = asyncio.run(_under_traffic(bench, server, number))
                bench.note(section, name, outcomes)
                bench.note(section, f"seconds to an answer after {name}", _answers_again(bench, server, picture))
                lost += outcomes["lost or mixed up"]
                bench.mark(f"requests lost over {name}", outcomes["lost or mixed up"], 0, at_most=True)
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
            bench.note(section, "log", server.log[-4000:])
    if lost or full.broken:
        raise RuntimeError(f"{lost} requests lost over faults, {full.broken} while the memory was full")


async def _under_traffic(bench: Bench, server: Running, number: signal.Signals) -> dict[str, int]:
    """Send a signal to the engine while requests come, and return what became of them."""
    seconds = 4 * bench.seconds
    caller = HttpCaller("127.0.0.1", int(server.url.rpartition(":")[2]), patience=_ANSWER)
    known = await learn(caller, read(bench.files))
    rate = bench.record.section("http").get("rate") or 40.0
    traffic = Traffic(caller, known, seed=0, mix={Kind.CLASSIFY: 1})

    async def hurt() -> None:
        await asyncio.sleep(seconds / 4)
        os.kill(_engine(server), number)

    await asyncio.gather(traffic.run(min(_MOST_TRAFFIC, rate / 2), seconds), hurt())
    found = {str(outcome): count for (_, outcome), count in traffic.counts.items()}
    return found | {"lost or mixed up": traffic.faults}


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


def _answers_again(bench: Bench, server: Running, picture: bytes) -> float:
    began, end = time.monotonic(), time.monotonic() + bench.left()
    while time.monotonic() < end:
        try:
            ask(server.url, OURS, picture)
        except OSError:
            time.sleep(0.05)
        else:
            return round(time.monotonic() - began, 2)
    raise RuntimeError(f"no answer in time: {server.log[-2000:]}")


def _best_workers(bench: Bench) -> int:
    tried = bench.record.section("http").get("workers", {})
    return int(max(tried, key=lambda name: float(tried[name]["rate"]))) if tried else bench.arguments.workers[0]


def _preprocess(bench: Bench) -> Any:
    from model.checkpoint import load_checkpoint  # noqa: PLC0415  torch takes seconds to import

    return load_checkpoint(str(bench.folder)).preprocess


@contextmanager
def _server(
    bench: Bench,
    workers: int,
    variant: str,
    batch: int | None,
    environment: dict[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[Running]:
    """Start a service of what is measured, or of another checkpoint, and load it until its sizes are found."""
    config = bench.service_settings(workers, variant, batch) | (environment or {})
    picture = bench.files[0].read_bytes()
    with running(VITSERVE, folder or bench.folder, config, picture=picture, timeout=bench.left()) as server:
        # Threads and allocators find their sizes.
        _closed(bench, server, bench.arguments.connections, min(1, bench.seconds))
        yield server


def _closed(bench: Bench, server: Running, connections: int, seconds: float = 0) -> Load:
    plan = Plan(server.url, OURS, read(bench.files), seconds or bench.seconds, connections)
    return load(plan, processes=bench.arguments.load_processes)


def _open(bench: Bench, server: Running, rate: float) -> dict[str, Any]:
    """Send at a rate, and say whether the generator kept it up: late itself, it would be measured, not the server."""
    plan = Plan(server.url, OURS, read(bench.files), bench.seconds, rate=rate)
    found = load(plan, processes=bench.arguments.load_processes)
    return found.as_json() | {"wanted": round(rate, 1), "kept_up": found.rate > 0.95 * rate}
