"""vitserve on a GPU: `python -m benchmarks.gpu`. ViT-B/16 at 224 pixels, bfloat16, random weights.

    smoke      a tiny model: does it compute, compile and answer over HTTP here?
    maps       maps and classes, compared with float32 on the CPU
    engine     images a second at each batch size: from host memory, with maps, with relevance, in
               an engine process that workers ask; timm under torch.compile, with pixels on the
               device; 20 s of one size
    profile    the kernels of one batch
    http       JPEGs of about 500 x 375 and 124 kB over HTTP, with several numbers of web workers;
               p99 at half load
    start      seconds from start to the first answer and to compiled, with an empty and with a warm
               compile cache
    decode     nvJPEG through torchvision: rate, host time a picture, difference to Pillow, and odd
               files
    pixels     raw pixels of the model's size over HTTP, by the Open Inference Protocol
    pair       two engine processes on one GPU, asked at once
    reload     40 loads of a tiny model while a model is served: all answers stay the same
    faults     kill -9 of the engine under load, by `benchmarks.reliability`
    tests      the tests of CUDA

Each step is a process of its own, which ends when its time is up; a step that fails or hangs is
recorded, and the next one runs. Every figure is saved as soon as it is there. The same command goes
on where the record stops. `--limit` is the seconds of a whole run; `seconds_of` shares them out.
Packages that the machine lacks come from the folder that `make gpu-kit` has written, if it
is there. `--device cpu --smoke` runs all of it in tiny form, to test the script, not to measure.
`--device null` measures the host side alone, on any machine: `benchmarks.null_device`. GPU.md says
what to run in an hour.

benchmarks/results/gpu.json has the figures of an H200 for smoke, maps, http and engine. The other
steps are not recorded yet.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.checkpoints import REPOSITORY
from benchmarks.record import Record

# What is imported above comes with Python. All else comes from the kit, and may be missing or
# broken: `gpu_steps`.

# Seconds of a run. A step that hangs is killed `KILL_SECONDS` after its time.
_LIMIT = 540.0
KILL_SECONDS = 20
# In the order of their worth, with the seconds that each needs.
STEPS = {
    "smoke": 90,
    "maps": 90,
    "engine": 400,
    "profile": 60,
    "http": 200,
    "start": 200,
    "faults": 100,
    "tests": 160,
    "decode": 60,
    "pixels": 90,
    "pair": 150,
    "reload": 200,
}


def seconds_of(steps: Sequence[str], limit: float) -> dict[str, float]:
    """Return the seconds that each step of a run has at most.

    Time that no step needs is shared in proportion. If the steps need more than the limit, the last
    ones wait for the next run.
    """
    spare = max(1.0, limit / max(1, sum(STEPS[name] for name in steps)))
    return {name: min(STEPS[name] * spare, limit) for name in steps}


def environment_of_steps(kit: Path, folder: Path) -> dict[str, str]:
    """Return the environment of the steps, which import packages from the kit.

    The kit's compiled resize is copied into the tree.

    Args:
        kit: see `benchmarks.gpu_kit`; it may be absent.
        folder: an empty one, where its wheels are unpacked.
    """
    for library in kit.glob("*.so"):
        shutil.copy(library, REPOSITORY / "model" / "images")
    for wheel in kit.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    path = [str(folder), str(kit), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONFAULTHANDLER": "1",
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(STEPS),
        metavar="STEP",
        help="(default: all that are not done)",
    )
    parser.add_argument("--step", choices=list(STEPS), help=argparse.SUPPRESS)
    parser.add_argument(
        "--device", default="cuda:0", help="`null`: the host side alone, see `null_device`"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--reference-mode", default="reduce-overhead", help="of torch.compile for timm"
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[128], help="all but `engine` takes the first"
    )
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        help="numbers of web workers to try (default: by the cores)",
    )
    parser.add_argument("--connections", type=int, default=512)
    parser.add_argument("--load-processes", type=int, default=3)
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="VIT_NAME=VALUE", help="further settings"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2, help="of one measurement")
    parser.add_argument("--limit", type=float, default=_LIMIT, help="seconds of the whole run")
    parser.add_argument(
        "--out", type=Path, default=REPOSITORY / "runs" / "gpu", help="folder of the record"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny model and times, nothing compiled: tests the script",
    )
    arguments = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0))
    arguments.workers = arguments.workers or [max(2, share * cores // 16) for share in (8, 12)]
    if arguments.smoke:
        arguments.batches = [4]
        arguments.dtype = "float32"
        arguments.rounds = 1
        arguments.seconds = 0.3
        arguments.workers = [2]
        arguments.connections = 4
        arguments.load_processes = 1
        arguments.out = arguments.out / "smoke"
    return arguments


def measure_null(arguments: argparse.Namespace) -> int:
    """Measure the host side of an engine process with a device that only takes time; return its
    exit code.
    """
    options = ["--rounds", str(arguments.rounds), "--seconds", str(arguments.seconds)]
    options += ["--record", str(arguments.out / "null_device.json")]
    if arguments.smoke:
        options += ["--size", "32", "--batch", "4", "--clients", "1"]
    command = [sys.executable, "-m", "benchmarks.null_device", *options]
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode


def main(argv: Sequence[str]) -> int:
    """Measure, print, save. 0: no step failed; 1: some did."""
    arguments = parse(argv)
    if arguments.device == "null":
        return measure_null(arguments)
    read = partial(
        Record, arguments.out / "gpu.json", dtype=arguments.dtype, about={"smoke": arguments.smoke}
    )
    record = read()
    done = set(record.section("seconds")) - set(record.section("errors"))
    end = time.monotonic() + arguments.limit
    with tempfile.TemporaryDirectory(prefix="vitserve-kit-") as folder:
        environment = environment_of_steps(REPOSITORY / "dist" / "gpu-kit", Path(folder))
        steps = arguments.only or [name for name in STEPS if name not in done]
        for name, seconds in seconds_of(steps, arguments.limit).items():
            began = time.monotonic()
            allowed = min(seconds, end - began)
            if allowed < 10:
                print(f"\n== {name}: left for the next run, the time is up", flush=True)
                continue
            print(f"\n== {name}, at most {allowed:.0f} s", flush=True)
            record.section("errors").pop(name, None)
            record.save()
            timed = ["timeout", "--foreground", f"--kill-after={KILL_SECONDS}", str(allowed)]
            command = [*timed, sys.executable, "-m", "benchmarks.gpu_steps", *argv, "--step", name]
            code = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, check=False
            ).returncode
            record = read()  # the step has written into it
            if code:
                record.section("errors").setdefault(
                    name, f"ended with {code}; 124: its time was up"
                )
            record.note(time.monotonic() - began, "seconds", name)
    errors = record.section("errors")
    print(f"record: {record.path}; failed: {', '.join(errors) or 'none'}")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
