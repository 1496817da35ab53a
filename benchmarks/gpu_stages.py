"""The steps of the GPU benchmark that need no server; see `benchmarks.gpu`."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks import gpu_machine
from benchmarks.checkpoints import REPOSITORY
from benchmarks.gpu_bench import Bench
from benchmarks.record import table
from model.prediction import RequestedOutputs

TESTS = [
    *("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"),
    *("tests/model/runtime/cuda/test_cuda.py", "tests/model/runtime/test_float8.py"),
]
"""What the step `tests` has Python run; the tests of CUDA are among them, and skipped without it."""

_RATIO, _RATIO_AIM, _RATE, _MAPS, _SAME = 1.15, 1.25, 12_000, 0.97, 0.98
_AGREEMENT_PICTURES = 512
_EXACT_PICTURES = 64


def versions(bench: Bench) -> None:
    """What the machine says of itself; the record has the versions of the packages from its beginning."""
    bench.note(bench.record.section("host"), "nvidia-smi", gpu_machine.listing())
    variables = {n: v for n, v in os.environ.items() if n.startswith(("CUDA", "NVIDIA", "PYTORCH", "TORCH", "TRITON"))}
    bench.note(bench.record.section("host"), "environment", variables)


def tests(bench: Bench) -> None:
    """The tests that need CUDA; under compute-sanitizer too, where it is installed and time is not short."""
    section = bench.record.section("tests")
    plain = [sys.executable, *TESTS]
    bench.note(section, "plain", _run(plain, 240 if bench.arguments.quick else 900))
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or bench.arguments.quick:
        bench.note(section, "compute-sanitizer", "not installed" if sanitizer is None else "left out by --quick")
    else:
        bench.note(section, "compute-sanitizer", _run([sanitizer, "--error-exitcode", "99", *plain], 1800))
    failed = [name for name, found in section.items() if isinstance(found, dict) and found["exit"]]
    if failed:
        raise RuntimeError(f"tests failed ({', '.join(failed)}); the record has the end of their output")


def _run(command: list[str], timeout: float) -> dict[str, Any]:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        return {"exit": -1, "output": f"not done within {timeout:g} s: {str(error.stdout or '')[-3000:]}"}
    return {"exit": done.returncode, "output": (done.stdout + done.stderr)[-4000:]}


def sweep(bench: Bench) -> None:
    """Each variant and batch size once; what the record has is not measured again."""
    found = bench.record.section("sweep")
    for variant in bench.arguments.variants:
        rates = found.setdefault(f"ours, {variant}", {})
        if any(str(batch) not in rates for batch in bench.arguments.batches):
            ours = bench.ours(variant, bench.arguments.batches)
            _sweep(bench, f"ours, {variant}", rates, ours.rate)
    rates = found.setdefault("reference", {})
    if any(str(batch) not in rates for batch in bench.arguments.batches):
        reference = bench.reference()
        found["reference is"] = reference.name
        _sweep(bench, "reference", rates, partial(reference.call, "rate"))


def _sweep(bench: Bench, name: str, rates: dict[str, float], measure: Callable[[int, float], float]) -> None:
    for batch in bench.arguments.batches:
        if str(batch) not in rates:
            with gpu_machine.meter(bench.gpu) as state:
                rate = measure(batch, bench.seconds)
            bench.record.section("machine")[f"{name}, batch {batch}"] = state
            bench.note(rates, str(batch), round(rate, 1))


def profile(bench: Bench) -> None:
    """The kernels of one batch of 64, ours and the reference's: which attention, shares of products and GELU."""
    from benchmarks.gpu_engine import TOP_K, random_pictures  # noqa: PLC0415  torch takes seconds to import

    variant, _ = bench.best_of_ours()
    batch = bench.default
    ours = bench.ours(variant, [batch])
    pictures = random_pictures(ours.checkpoint, batch)
    ours.rate(batch, min(1, bench.seconds))
    one_batch = partial(ours.predictor.predict, pictures, RequestedOutputs(TOP_K))
    found = gpu_machine.kernels(one_batch, bench.arguments.device)
    section = bench.record.section("profile")
    bench.note(section, f"ours, batch {batch}", found)
    bench.note(section, f"reference, batch {batch}", bench.reference().call("kernels", batch))


def engine(bench: Bench) -> None:
    """Rounds of one measurement each; ratios are taken within a round."""
    variant, batch = bench.best_of_ours()
    theirs = bench.best_of_reference()
    section = bench.record.section("engine")
    ours, reference = bench.ours(variant, [batch]), bench.reference()
    bench.note(section, "exact", ours.agreement(_subjects(bench, ours, _EXACT_PICTURES)))
    last = ours.predictor.config.depth - 1
    rounds: list[dict[str, float]] = []
    with gpu_machine.meter(bench.gpu) as state:
        for _ in range(bench.arguments.rounds):
            measured = {
                "ours": ours.rate(batch, bench.seconds),
                "maps": ours.rate(batch, bench.seconds, last),
                "reference": reference.call("rate", theirs, bench.seconds),
                "resident": reference.call("resident_rate", theirs, bench.seconds),
            }
            rounds.append({name: round(rate, 1) for name, rate in measured.items()})
            bench.note(section, "rounds", rounds)
    count = max(1, _AGREEMENT_PICTURES // theirs) * theirs
    pictures = _subjects(bench, ours, count)
    equal = float((ours.top1(pictures) == reference.call("top1", pictures, theirs)).mean())
    section |= {
        "ours": {"variant": variant, "batch": batch, "compiled": ours.predictor.compiled, **ours.peak_memory()},
        "reference": {"name": reference.name, "batch": theirs},
        "ours_rate": statistics.median(r["ours"] for r in rounds),
        "reference_rate": statistics.median(r["reference"] for r in rounds),
        "reference_resident_rate": statistics.median(r["resident"] for r in rounds),
        "ratio": round(statistics.median(r["ours"] / r["reference"] for r in rounds), 3),
        "ratio_to_resident": round(statistics.median(r["ours"] / r["resident"] for r in rounds), 3),
        "with_maps": round(statistics.median(r["maps"] / r["ours"] for r in rounds), 3),
        "equal_top1": round(equal, 4),
        "machine": state,
    }
    if last:
        bench.note(section, "rows of the first layer, images/s", round(ours.rate(batch, bench.seconds, 0), 1))
    names = ("ours_rate", "reference_rate", "reference_resident_rate", "ratio", "ratio_to_resident", "with_maps")
    print(table(["engine", "images/s or ratio"], [(name, section[name]) for name in names]), flush=True)
    other = section["reference"]["name"].split(" (")[0]
    bench.mark(f"engine / {other} at its best", section["ratio"], _RATIO)
    bench.mark(f"engine / {other} at its best (the aim)", section["ratio"], _RATIO_AIM)
    bench.mark("engine, images/s", section["ours_rate"], _RATE)
    bench.mark("engine, a map of every image / none", section["with_maps"], _MAPS)
    bench.mark(f"same class as {other}, of all pictures", section["equal_top1"], _SAME)
    bench.mark("same class as float32 on the CPU, where it is sure", section["exact"]["equal_top1_of_sure"], 1)


def mixed(bench: Bench) -> None:
    """Batches of every size, padded to the sizes that a service without settings launches."""
    variant, _ = bench.best_of_ours()
    ours = bench.ours(variant)
    found = ours.mixed_rate(bench.seconds) | {"sizes": ours.predictor.batch_sizes}
    bench.note(bench.record.section("mixed"), variant, found)


def float8(bench: Bench) -> None:
    """Our rate in float8 beside the one in the dtype of all other steps, at the best batch size of that."""
    from model.errors import DeviceError  # noqa: PLC0415

    variant, batch = bench.best_of_ours()
    section = bench.record.section("float8")
    bench.note(section, bench.arguments.dtype, round(bench.ours(variant, [batch]).rate(batch, bench.seconds), 1))
    try:
        ours = bench.ours(variant, [batch], dtype="float8")
    except DeviceError as error:
        bench.note(section, "refused", str(error))
        return
    with gpu_machine.meter(bench.gpu) as state:
        bench.note(section, "float8", round(ours.rate(batch, bench.seconds), 1))
    bench.record.section("machine")["float8"] = state
    bench.note(section, "ratio", round(section["float8"] / section[bench.arguments.dtype], 3))
    bench.note(section, "agreement", ours.predictor.agreement)


def _subjects(bench: Bench, ours: Any, count: int) -> Any:
    """The photographs as the model sees them, and noise."""
    from benchmarks.gpu_engine import random_pictures  # noqa: PLC0415
    from model.images.preprocess import preprocess  # noqa: PLC0415

    pictures = random_pictures(ours.checkpoint, count, seed=9)
    for index, file in enumerate(bench.files[:count]):
        pictures[index] = preprocess(file.read_bytes(), ours.checkpoint.preprocess)
    return pictures
