"""vitserve on a GPU: `python -m benchmarks.gpu`. ViT-B/16 at 224 pixels, bfloat16, random weights.

    versions   the GPU, its driver, versions, what of vitserve's requirements is not met
    smoke      a tiny model: does it compute, compile and answer over HTTP here?
    sweep      images per second over batch sizes, pixels resident on the device: ours and timm under torch.compile
    engine     both at their best batch size, in turn: resident, from host memory, and ours through an engine process
    http       JPEGs of about 500 x 375 and 124 kB over HTTP, against what decoding and the engine alone reach; p99 at
               half load
    decode     JPEGs decoded and resized by 1 to all cores, and how many cores 4,000 and 5,000 a second take
    profile    the kernels of one batch: shares of products, attention and GELU
    attention  the kernels of attention, each alone: cuDNN, flash, efficient, at 197 and at 50 tokens
    latency    one picture at a time, and HTTP at 90 % of the full rate
    mixed      batches of every size from 1 to the largest, padded as a service pads them
    start      seconds from start to ready, with an empty and with a warm compile cache
    faults     kill -9 of the engine and a fault of the GPU under load, memory that another process has filled
    tests      the tests of CUDA, under compute-sanitizer too

Each step is a process of its own, which ends when its time is up; a step that fails, hangs or is killed is recorded,
and the next one runs. Every figure is saved as soon as it is there, beside memory, clocks and power at that time. The
same command goes on where the record stops: a step that is done is left out unless `--only` names it or `--fresh`
begins anew. `--limit` is the seconds of a whole run, `--quick` is one of 540. Packages that the machine lacks are taken
from the folder that `make gpu-kit` has written, if it is there. Without a GPU it exits with 2; `--device cpu --smoke`
runs all of it in tiny form there, to test the script, not to measure. GPU.md says what to run in an hour.

State of this benchmark: its GPU part has not been run yet. No record of a GPU is in benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
import zipfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.checkpoints import REPOSITORY
from benchmarks.record import Record, table
from benchmarks.servers import kill_marked

# What is imported above comes with Python. All else may be missing or broken, and is imported within a step.


class Step(NamedTuple):
    """Where a step is, and the seconds that a run with a limit gives it at most."""

    module: str
    seconds: float


STEPS: Mapping[str, Step] = {
    "versions": Step("gpu_stages", 60),
    "smoke": Step("gpu_servers", 90),
    "sweep": Step("gpu_stages", 200),
    "engine": Step("gpu_stages", 200),
    "http": Step("gpu_servers", 150),
    "decode": Step("gpu_stages", 40),
    "profile": Step("gpu_stages", 80),
    "attention": Step("gpu_stages", 40),
    "latency": Step("gpu_servers", 100),
    "mixed": Step("gpu_stages", 60),
    "start": Step("gpu_servers", 200),
    "faults": Step("gpu_servers", 150),
    "tests": Step("gpu_stages", 300),
}

_STEP = "VITSERVE_GPU_STEP"
"""Environment of a step's processes, by which they are found: its name, the monotonic second of its end, a number."""
_UNLIMITED = 10
"""A run without a limit gives a step so many times its seconds."""
_LEAST = 10.0
"""No step begins with fewer seconds left."""
_QUICK = 540.0
_NO_DEVICE = 2

RunStep = Callable[[str, float], int | None]
"""Run a step within some seconds and return its exit code; None if its time was up."""


def run_steps(
    names: Sequence[str],
    record: Record,
    run: RunStep,
    *,
    limit: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run each step, and record those that fail. Returns their names.

    Args:
        limit: seconds of all steps together; None is no limit.
    """
    failed = []
    end = math.inf if limit is None else clock() + limit
    for name in names:
        started = clock()
        allowed = min(STEPS[name].seconds * (_UNLIMITED if limit is None else 1), end - started)
        if allowed < _LEAST:
            print(f"\n== {name}: left for the next run, the time is up", flush=True)
            continue
        print(f"\n== {name}, at most {allowed:.0f} s", flush=True)
        for section in ("errors", "step_seconds"):
            record.section(section).pop(name, None)
        record.save()
        code = run(name, allowed)
        record.reload()  # the step has written into it
        if code != 0:
            how = f"stopped after {allowed:.0f} s" if code is None else f"ended with code {code}"
            problem = record.section("errors").setdefault(name, how)
            print(f"{name}: {problem}", file=sys.stderr, flush=True)
            failed.append(name)
        record.section("step_seconds")[name] = round(clock() - started, 1)
        record.save()
        if code == _NO_DEVICE:
            break
    return failed


def run_in_child(command: Sequence[str], environment: Mapping[str, str], name: str, seconds: float) -> int | None:
    """Run a step in a process of its own, and end all that it has started; see `RunStep`."""
    value = f"{name} {time.monotonic() + seconds} {uuid.uuid4().hex}"
    process = subprocess.Popen(command, env={**environment, _STEP: value}, stdin=subprocess.DEVNULL)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill_marked(f"{_STEP}={value}")
        process.wait()


def run_step(arguments: argparse.Namespace, name: str, end: float) -> int:
    """Run one step in this process, and return its exit code; what it raises is recorded."""
    record = Record(_path(arguments), dtype=arguments.dtype, about={})
    try:
        module = importlib.import_module(f"benchmarks.{STEPS[name].module}")
        device = importlib.import_module("model.runtime.device")
        errors = importlib.import_module("model.errors")
        try:
            arguments.device = str(device.choose_device(arguments.device))
        except errors.DeviceError as error:
            record.section("errors")[name] = str(error)
            record.save()
            return _NO_DEVICE
        bench = importlib.import_module("benchmarks.gpu_bench").Bench(record, arguments, end)
        try:
            getattr(module, name)(bench)
        finally:
            bench.close()
    except Exception as error:  # noqa: BLE001  whatever it is, it is recorded and the next step runs
        traceback.print_exc()
        record.section("errors")[name] = f"{type(error).__name__}: {error}"[:2000]
        record.save()
        return 1
    return 0


def environment_of_steps(kit: Path, folder: Path) -> dict[str, str]:
    """Return the environment of the steps, which import what is in the kit.

    Args:
        kit: see `benchmarks.gpu_kit`; it may be absent.
        folder: an empty one, where its wheels are unpacked.
    """
    wheels = sorted(kit.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    path = [*([str(folder)] if wheels else []), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "PYTHONFAULTHANDLER": "1"}
    if not os.access(REPOSITORY / "benchmarks", os.W_OK):
        found.setdefault("VITSERVE_BENCHMARK_CACHE", str(Path(tempfile.gettempdir()) / "vitserve-benchmarks"))
    return found


def _path(arguments: argparse.Namespace) -> Path:
    path: Path = arguments.out / ("gpu-smoke.json" if arguments.smoke else "gpu.json")
    return path


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="STEP", help="(default: all that are not done)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--reference-mode", help="of torch.compile for timm (default: max-autotune; quick: reduce-overhead)"
    )
    parser.add_argument("--variants", default="on", help="our compile modes to sweep: on,max")
    parser.add_argument("--batches", type=_numbers, help="sizes to sweep")
    parser.add_argument("--reference-batches", type=_numbers, help="sizes to sweep of timm")
    parser.add_argument("--workers", type=_numbers, help="numbers of web workers to try (default: by the cores)")
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--load-processes", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="further settings")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of one measurement (default: 4)")
    parser.add_argument("--limit", type=float, help="seconds of the whole run")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu", help="folder of the record")
    parser.add_argument("--kit", type=Path, default=REPOSITORY / "dist" / "gpu-kit", help="folder of `make gpu-kit`")
    parser.add_argument("--fresh", action="store_true", help="begin a new record")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, within nine minutes")
    parser.add_argument("--smoke", action="store_true", help="tiny model and times, nothing compiled: tests the script")
    arguments = parser.parse_args(argv)
    arguments.variants = arguments.variants.split(",")
    named = [name for names in arguments.only or () for name in names.split(",")]
    if unknown := set(named) - set(STEPS):
        parser.error(f"--only {','.join(sorted(unknown))}: steps are {', '.join(STEPS)}")
    arguments.only = [name for name in STEPS if name in named]
    cores, quick = len(os.sched_getaffinity(0)), arguments.quick
    # On 132 multiprocessors 256 pictures of 197 tokens fill 8.95 waves of 128 x 256 tiles, 64 of them 2.25; 57, 114 and
    # 228 fill whole waves. Which is best is for the sweep to say.
    arguments.batches = arguments.batches or ([64, 128, 256] if quick else [57, 64, 114, 128, 228, 256])
    arguments.reference_batches = arguments.reference_batches or ([128] if quick else [64, 128, 256])
    arguments.reference_mode = arguments.reference_mode or ("reduce-overhead" if quick else "max-autotune")
    shares = (12,) if quick else (8, 12, 14)
    arguments.workers = arguments.workers or [max(2, share * cores // 16) for share in shares]
    arguments.rounds = arguments.rounds or (2 if quick else 5)
    arguments.limit = arguments.limit or (_QUICK if quick else None)
    arguments.seconds = arguments.seconds or (0.3 if arguments.smoke else 2 if quick else 4)
    if arguments.smoke:
        arguments.variants, arguments.batches, arguments.dtype = ["off"], [2, 4], "float32"
        arguments.reference_batches, arguments.reference_mode = [4], None
        arguments.workers, arguments.connections, arguments.load_processes = [2], 4, 1
        arguments.rounds = 1
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save. 0: no step failed; 1: some did; 2: no such device."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(argv)
    if _STEP in os.environ:
        name, end, _ = os.environ[_STEP].split()
        return run_step(arguments, name, float(end))
    if arguments.fresh:
        _path(arguments).unlink(missing_ok=True)
    record = Record(_path(arguments), dtype=arguments.dtype, about={"smoke": arguments.smoke})
    done = set(record.section("step_seconds")) - set(record.section("errors"))
    with tempfile.TemporaryDirectory(prefix="vitserve-kit-") as folder:
        environment = environment_of_steps(arguments.kit, Path(folder))
        command = [sys.executable, "-m", "benchmarks.gpu", *argv]
        names = arguments.only or [name for name in STEPS if name not in done]
        failed = run_steps(names, record, partial(run_in_child, command, environment), limit=arguments.limit)
    marks = record.section("marks").items()
    rows = [(name, mark["wanted"], mark["found"], "yes" if mark["reached"] else "NO") for name, mark in marks]
    print("\n" + table(["mark", "wanted", "found", "reached"], rows))
    print(f"record: {record.path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    no_device = failed and record.section("errors")[failed[-1]].startswith("device ")
    return _NO_DEVICE if no_device else int(bool(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the step's processes end, too
    sys.exit(main())
