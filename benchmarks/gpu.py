"""vitserve on a GPU: `python benchmarks/gpu.py`. ViT-B/16 at 224 pixels, bfloat16, random weights.

    sweep    images per second over batch sizes: ours and timm under torch.compile(mode="max-autotune")
    engine   both at their best batch size, in turn; and whether they agree
    http     over HTTP with JPEGs of about 500 x 375 and 124 kB, against what decoding and the engine alone reach
    latency  p50 and p99: one picture at a time, and at 50 % and 90 % of the full rate
    start    seconds from start to ready, with an empty and with a warm compile cache

`--only engine,http` runs some; each stage is saved when it is done, the same command goes on where the record stops
(the sweep; `--fresh` begins anew), and a stage that fails is recorded as failed and does not keep the others from
running. On a machine without a GPU it exits with 2; `--device cpu --smoke` runs all of it in tiny form there, to test
the script, not to measure.

State of this benchmark: its GPU part has not been run yet. No record of a GPU is in benchmarks/results.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script, only its own folder is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import checkpoints
from benchmarks.gpu_stages import Benchmark
from benchmarks.record import RESULTS, Record, table

STAGES = ("sweep", "engine", "http", "latency", "start")

# 57, 114 and 228 pictures of 197 tokens fill whole waves of 128 x 256 tiles on 132 multiprocessors, by arithmetic;
# powers of two leave up to a third of the last wave idle. Which is better is for the sweep to say.
_BATCHES = (57, 64, 114, 128, 228, 256)


def gpu(device: str) -> dict[str, Any]:
    """Name, driver and memory of the device, and what torch was built for."""
    import torch  # noqa: PLC0415

    if not device.startswith("cuda"):
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(torch.device(device))
    found = {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
    }
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        found["driver"] = "unknown: nvidia-smi did not answer"
    return found


def run_stages(stages: Sequence[tuple[str, Callable[[], None]]], record: Record) -> list[str]:
    """Run each; one that fails is recorded, and the next is run. Returns the names of those that failed."""
    failed = []
    errors = record.section("errors")
    for name, stage in stages:
        print(f"\n== {name}", flush=True)
        started = time.monotonic()
        errors.pop(name, None)
        try:
            stage()
        except Exception as error:  # noqa: BLE001  whatever it is, the other stages can still be measured
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"[:2000]
            failed.append(name)
        record.section("stage_seconds")[name] = round(time.monotonic() - started, 1)
        record.save()
    return failed


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python benchmarks/gpu.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default=",".join(STAGES), help="stages, comma-separated (default: all)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variants", default="on", help="our compile modes to sweep: on,max")
    parser.add_argument("--batches", type=_numbers, default=list(_BATCHES))
    parser.add_argument("--workers", type=_numbers, default=[1, 4, 8, 12], help="numbers of web workers to try")
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--load-processes", type=int, default=3)
    parser.add_argument("--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="further settings")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, help="of one measurement (default: 4)")
    parser.add_argument("--out", type=Path, help="folder of the record (default: benchmarks/results)")
    parser.add_argument("--fresh", action="store_true", help="begin a new record")
    parser.add_argument("--smoke", action="store_true", help="tiny model and times, nothing compiled: tests the script")
    arguments = parser.parse_args(argv)
    arguments.variants = arguments.variants.split(",")
    arguments.only = arguments.only.split(",")
    if unknown := set(arguments.only) - set(STAGES):
        parser.error(f"--only {','.join(sorted(unknown))}: stages are {', '.join(STAGES)}")
    arguments.out = arguments.out or (checkpoints.CACHE / "smoke" if arguments.smoke else RESULTS)
    arguments.seconds = arguments.seconds or (0.5 if arguments.smoke else 4)
    if arguments.smoke:
        arguments.variants, arguments.batches, arguments.dtype = ["off"], [2, 4], "float32"
        arguments.workers, arguments.connections, arguments.load_processes = [1], 4, 1
        arguments.rounds = 1
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, save. 0: all stages ran; 1: some failed; 2: no such device."""
    arguments = parse(sys.argv[1:] if argv is None else argv)
    from model.errors import DeviceError  # noqa: PLC0415
    from model.runtime.device import choose_device  # noqa: PLC0415

    try:
        arguments.device = str(choose_device(arguments.device))
    except DeviceError as error:
        print(f"benchmarks/gpu.py: {error}", file=sys.stderr)
        return 2
    about = gpu(arguments.device)
    name = re.sub(r"[^a-z0-9]+", "-", about["name"].lower()).strip("-")
    path = arguments.out / f"gpu-{name}{'-smoke' if arguments.smoke else ''}.json"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    record = Record(path, dtype=arguments.dtype, about={"gpu": about, "smoke": arguments.smoke})
    benchmark = Benchmark(record, arguments)
    failed = run_stages([(name, getattr(benchmark, name)) for name in STAGES if name in arguments.only], record)
    rows = [
        (name, m["wanted"], m["found"], "yes" if m["reached"] else "NO") for name, m in record.section("marks").items()
    ]
    print("\n" + table(["mark", "wanted", "found", "reached"], rows))
    print(f"record: {path}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
