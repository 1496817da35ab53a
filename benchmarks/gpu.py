"""vitserve on a GPU: `python -m benchmarks.gpu`. ViT-B/16 at 224 pixels, bfloat16, random weights.

    versions  nvidia-smi, versions, variables
    tests     tests/model/runtime/cuda/test_cuda.py, under compute-sanitizer too
    sweep     images per second over batch sizes: ours and timm under torch.compile(mode="max-autotune")
    profile   the kernels of one batch of 64: which attention, shares of products and GELU
    engine    both at their best batch size, in turn; with a map of every image; whether they agree with each other and
              with float32 on the CPU
    start     seconds from start to ready, with an empty and with a warm compile cache
    latency   p50 and p99: one picture at a time, and at 50 % and 90 % of the full rate
    http      over HTTP with JPEGs of about 500 x 375 and 124 kB, against what decoding and the engine alone reach
    mixed     batches of every size from 1 to the largest, padded as a service pads them
    float8    our rate in float8 beside bfloat16's, and how often both give the same class
    faults    kill -9 of the engine, the metrics, a second process that fills the memory

Every figure is saved as soon as it is there, beside memory, clocks and power at that time. The same command goes on
where the record stops: a step that is done is left out unless `--only` names it or `--fresh` begins anew, and one that
fails is recorded and does not keep the others from running. `--quick` begins no step after nine minutes. On a machine
without a GPU it exits with 2; `--device cpu --smoke` runs all of it in tiny form there, to test the script, not to
measure. GPU.md has the commands of the first half hour.

State of this benchmark: its GPU part has not been run yet. No record of a GPU is in benchmarks/results.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkpoints, gpu_machine, gpu_servers, gpu_stages
from benchmarks.gpu_bench import Bench
from benchmarks.record import RESULTS, Record, table

STEPS: dict[str, Callable[[Bench], None]] = {
    "versions": gpu_stages.versions,
    "tests": gpu_stages.tests,
    "sweep": gpu_stages.sweep,
    "profile": gpu_stages.profile,
    "engine": gpu_stages.engine,
    "start": gpu_servers.start,
    "latency": gpu_servers.latency,
    "http": gpu_servers.http,
    "mixed": gpu_stages.mixed,
    "float8": gpu_stages.float8,
    "faults": gpu_servers.faults,
}

# 57, 114 and 228 pictures of 197 tokens fill whole waves of 128 x 256 tiles on 132 multiprocessors, by arithmetic;
# powers of two leave up to a third of the last wave idle. Which is better is for the sweep to say.
_BATCHES = (57, 64, 128)
_QUICK_SECONDS = 9 * 60


def run_steps(
    steps: Sequence[tuple[str, Callable[[], None]]],
    record: Record,
    *,
    seconds: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Run each; one that fails is recorded, and the next is run. Returns the names of those that failed.

    Args:
        seconds: no step begins later than this; None is no limit.
    """
    failed = []
    errors, taken = record.section("errors"), record.section("step_seconds")
    began = clock()
    for name, step in steps:
        started = clock()
        if seconds is not None and started - began > seconds:
            print(f"\n== {name}: left for the next run, the time is up", flush=True)
            continue
        print(f"\n== {name}", flush=True)
        errors.pop(name, None)
        taken.pop(name, None)
        try:
            step()
        except Exception as error:  # noqa: BLE001  whatever it is, the other steps can still be measured
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"[:2000]
            failed.append(name)
        taken[name] = round(clock() - started, 1)
        record.save()
    return failed


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="steps, comma-separated (default: all that are not done)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    libraries = ("auto", "timm", "transformers", "plain")
    parser.add_argument("--reference", choices=libraries, default="auto", help="what ours is compared with")
    parser.add_argument("--variants", default="on", help="our compile modes to sweep: on,max")
    parser.add_argument("--batches", type=_numbers)
    parser.add_argument("--workers", type=_numbers, help="numbers of web workers to try (default: 4,8,12)")
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--load-processes", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="further settings")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=float, help="of one measurement (default: 4)")
    parser.add_argument("--out", type=Path, help="folder of the record (default: benchmarks/results)")
    parser.add_argument("--fresh", action="store_true", help="begin a new record")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements, no step after 9 minutes")
    parser.add_argument("--smoke", action="store_true", help="tiny model and times, nothing compiled: tests the script")
    arguments = parser.parse_args(argv)
    arguments.variants = arguments.variants.split(",")
    arguments.named = arguments.only is not None
    arguments.only = arguments.only.split(",") if arguments.named else list(STEPS)
    if unknown := set(arguments.only) - set(STEPS):
        parser.error(f"--only {','.join(sorted(unknown))}: steps are {', '.join(STEPS)}")
    quick = arguments.quick
    arguments.batches = arguments.batches or ([64] if quick else list(_BATCHES))
    arguments.workers = arguments.workers or ([8] if quick else [4, 8, 12])
    arguments.rounds = arguments.rounds or (2 if quick else 5)
    arguments.out = arguments.out or (checkpoints.CACHE / "smoke" if arguments.smoke else RESULTS)
    arguments.seconds = arguments.seconds or (0.5 if arguments.smoke else 2 if quick else 4)
    if arguments.smoke:
        arguments.variants, arguments.batches, arguments.dtype = ["off"], [2, 4], "float32"
        arguments.workers, arguments.connections, arguments.load_processes = [2], 4, 1
        arguments.rounds = 1
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save. 0: all steps ran; 1: some failed; 2: no such device."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    from model.errors import DeviceError  # noqa: PLC0415  torch takes seconds to import
    from model.runtime.device import choose_device  # noqa: PLC0415

    try:
        arguments.device = str(choose_device(arguments.device))
    except DeviceError as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return 2
    about = gpu_machine.facts(arguments.device)
    name = re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-")
    path = arguments.out / f"gpu-{name}{'-smoke' if arguments.smoke else ''}.json"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    record = Record(path, dtype=arguments.dtype, about={"gpu": about, "smoke": arguments.smoke})
    done = set() if arguments.named else set(record.section("step_seconds")) - set(record.section("errors"))
    bench = Bench(record, arguments)
    steps = [(name, lambda step=STEPS[name]: step(bench)) for name in arguments.only if name not in done]
    try:
        failed = run_steps(steps, record, seconds=_QUICK_SECONDS if arguments.quick else None)
    finally:
        bench.close()
    rows = [
        (name, m["wanted"], m["found"], "yes" if m["reached"] else "NO") for name, m in record.section("marks").items()
    ]
    print("\n" + table(["mark", "wanted", "found", "reached"], rows))
    print(f"record: {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
