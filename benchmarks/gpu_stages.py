"""The steps of the GPU benchmark that need no server; see `benchmarks.gpu`."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

from benchmarks import gpu_machine
from benchmarks.checkpoints import REPOSITORY
from benchmarks.gpu_bench import Bench, read
from benchmarks.gpu_engine_process import EngineProcess
from benchmarks.record import table
from model.outputs import RequestedOutputs

TESTS = ["-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short"]
_TESTED = ("tests/model/runtime/cuda/test_cuda.py",)
"""What the step `tests` has Python run; the tests of CUDA are among them, and skipped without it."""
_TESTED_IN_SMOKE = (_TESTED[-1], "-k", "test_a_cpu_is_told")

_RESIDENT, _RATIO, _PROCESS, _MAPS, _SAME = 12_000, 1.15, 0.9, 0.97, 0.98
_HTTP_RATES = (4_000, 5_000)
_AGREEMENT_PICTURES = 512
_EXACT_PICTURES = 64
_TOKENS = (197, 50)
_CALLS = 50


def versions(bench: Bench) -> None:
    """The GPU, what the machine says of itself, and what of the requirements is not met here."""
    print(f"gpu: {bench.record.data['gpu']}", flush=True)
    host = bench.record.section("host")
    bench.note(host, "requirements that are not met", unmet_requirements())
    variables = {n: v for n, v in os.environ.items() if n.startswith(("CUDA", "NVIDIA", "PYTORCH", "TORCH", "TRITON"))}
    bench.note(host, "environment", variables)
    bench.note(host, "nvidia-smi", gpu_machine.listing(min(20, bench.left() / 2)))


def unmet_requirements() -> list[str]:
    """Return what vitserve's metadata requires, and what that requires, and is absent here or too old."""
    from packaging.requirements import Requirement  # noqa: PLC0415  may be absent

    unmet, seen, waiting = set[str](), {"vitserve"}, ["vitserve"]
    while waiting:
        name = waiting.pop()
        lines = []
        with suppress(importlib.metadata.PackageNotFoundError):
            lines = importlib.metadata.requires(name) or []
        for requirement in map(Requirement, lines):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(requirement.name)
            except importlib.metadata.PackageNotFoundError:
                unmet.add(f"{name} needs {requirement}, which is absent")
                continue
            if not requirement.specifier.contains(version, prereleases=True):
                unmet.add(f"{name} needs {requirement}, and {version} is installed")
            if requirement.name not in seen:
                seen.add(requirement.name)
                waiting.append(requirement.name)
    return sorted(unmet)


def sweep(bench: Bench) -> None:
    """Each variant and batch size once; what the record has is not measured again."""
    rates = bench.record.section("sweep")
    for variant in bench.arguments.variants:
        found = rates.setdefault(f"ours, {variant}", {})
        missing = [batch for batch in bench.arguments.batches if str(batch) not in found]
        if missing:
            ours = bench.ours(variant, missing)

            def resident(batch: int, seconds: float, ours: Any = ours) -> float:
                return ours.resident_rate(batch, seconds) or ours.rate(batch, seconds)  # type: ignore[no-any-return]

            _sweep(bench, f"ours, {variant}", missing, found, resident)
    bench.release()
    found = rates.setdefault("reference", {})
    missing = [batch for batch in bench.arguments.reference_batches if str(batch) not in found]
    if missing:
        reference = bench.reference()
        rates["reference is"] = reference.name
        _sweep(bench, "reference", missing, found, partial(reference.call, "resident_rate"))


def _sweep(
    bench: Bench, name: str, batches: list[int], rates: dict[str, float], measure: Callable[[int, float], float]
) -> None:
    for batch in batches:
        with gpu_machine.meter(bench.gpu) as state:
            rate = measure(batch, bench.seconds)
        bench.record.section("machine")[f"{name}, batch {batch}"] = state
        bench.note(rates, str(batch), round(rate, 1))


def engine(bench: Bench) -> None:
    """Rounds of one measurement each; ratios are taken within a round, and told after each."""
    variant, batch = bench.best_of_ours()
    theirs, clients = bench.best_of_reference(), bench.arguments.workers[-1]
    section = bench.record.section("engine")
    settings = bench.service_settings(clients, variant, batch)
    with EngineProcess(settings, clients, bench.left) as process, gpu_machine.meter(bench.gpu) as state:
        reference = bench.reference()
        ours = bench.ours(variant, [batch])
        section["ours"] = {"variant": variant, "batch": batch, "compiled": ours.predictor.compiled}
        section["reference"] = {"name": reference.name, "batch": theirs}
        last = ours.predictor.checkpoint.vit.depth - 1
        measures: dict[str, Callable[[float], float | None]] = {
            "ours resident": partial(ours.resident_rate, batch),
            "reference resident": partial(reference.call, "resident_rate", theirs),
            "engine process": process.rate,
            "ours": partial(ours.rate, batch),
            "reference": partial(reference.call, "rate", theirs),
            "ours with maps": partial(ours.rate, batch, layer=last),
        }
        rounds: list[dict[str, float]] = []
        for number in range(bench.arguments.rounds):
            began = time.monotonic()
            rates = {name: measure(bench.seconds) for name, measure in measures.items()}
            rounds.append({name: round(rate, 1) for name, rate in rates.items() if rate is not None})
            bench.note(section, "rounds", rounds)
            _tell_engine(bench, section, rounds)
            if bench.left() < 2 * (time.monotonic() - began):
                print(f"{number + 1} rounds: there is no time for more", flush=True)
                break
    section["machine"] = state
    exact = ours.agreement(_subjects(bench, ours, _EXACT_PICTURES))
    bench.note(section, "exact", exact)
    bench.mark("same class as float32 on the CPU, where it is sure", exact["equal_top1_of_sure"], 1)
    pictures = _subjects(bench, ours, max(1, _AGREEMENT_PICTURES // theirs) * theirs)
    equal = float((ours.top1(pictures) == reference.call("top1", pictures, theirs)).mean())
    bench.note(section, "equal_top1", round(equal, 4))
    bench.mark("same class as the reference, of all pictures", section["equal_top1"], _SAME)


def _tell_engine(bench: Bench, section: dict[str, Any], rounds: list[dict[str, float]]) -> None:
    """Put the medians of the rounds into the record, and the marks."""
    section["rates"] = {name: round(statistics.median(r[name] for r in rounds), 1) for name in rounds[0]}

    def ratio(of: str, to: str) -> float:
        return round(statistics.median(r[of] / r[to] for r in rounds), 3)

    own = "ours resident" if "ours resident" in rounds[0] else "ours"  # without graphs nothing is resident
    theirs = "reference resident" if own == "ours resident" else "reference"
    section["ratios"] = {
        "ours / reference": ratio(own, theirs),
        "ours / reference, from host memory": ratio("ours", "reference"),
        "engine process / ours": ratio("engine process", own),
        "with maps / without": ratio("ours with maps", "ours"),
    }
    print(table(["engine", "images/s or ratio"], (section["rates"] | section["ratios"]).items()), flush=True)
    bench.mark(f"{own}, images/s", section["rates"][own], _RESIDENT)
    bench.mark(f"{own} / {section['reference']['name']}", section["ratios"]["ours / reference"], _RATIO)
    bench.mark("through the engine process / that", section["ratios"]["engine process / ours"], _PROCESS)
    bench.mark("a map of every image / none", section["ratios"]["with maps / without"], _MAPS)


def decode(bench: Bench) -> None:
    """Decoding and resizing on 1 to all cores, and the cores that the rates over HTTP take by that."""
    from benchmarks.gpu_decoding import decode_rate  # noqa: PLC0415
    from model.checkpoint import load_checkpoint  # noqa: PLC0415

    section = bench.record.section("decode")
    config, files = load_checkpoint(str(bench.folder)).preprocess, read(bench.files)
    cores = len(os.sched_getaffinity(0))
    rates = section.setdefault("pictures per second, by processes", {})
    for processes in sorted({1, max(1, cores // 2), cores}):
        rate = decode_rate(files, config, bench.seconds, processes=processes, patience=bench.left())
        bench.note(rates, str(processes), round(rate, 1))
    bench.note(section, "arithmetic", cores_for(rates[str(cores)], cores))


def cores_for(rate: float, cores: int) -> dict[str, float]:
    """Return the milliseconds of a picture on one of all cores that decode, and the cores that the marks take by it."""
    found = {"milliseconds of a core a picture": round(1000 * cores / rate, 2)}
    return found | {f"cores' worth at {wanted}/s": round(wanted * cores / rate, 1) for wanted in _HTTP_RATES}


def profile(bench: Bench) -> None:
    """The kernels of one batch, ours and the reference's: which attention, shares of products and GELU."""
    from benchmarks.gpu_engine import TOP_K, random_pictures  # noqa: PLC0415  torch takes seconds to import

    variant, batch = bench.best_of_ours()
    section = bench.record.section("profile")
    ours = bench.ours(variant, [batch])
    pictures = random_pictures(ours.checkpoint, batch)
    one_batch = partial(ours.predictor.predict, pictures, RequestedOutputs(TOP_K))
    one_batch()
    found = gpu_machine.kernels(one_batch, bench.arguments.device)
    bench.note(section, f"ours, batch {batch}", found)
    theirs = bench.best_of_reference()
    bench.note(section, f"reference, batch {theirs}", bench.reference().call("kernels", theirs))


def attention(bench: Bench) -> None:
    """Each of torch's kernels of attention alone, in the model's shapes, and what choosing another one would save."""
    section = bench.record.section("attention")
    _, batch = bench.best_of_ours()
    for tokens in _TOKENS:
        found: dict[str, Any] = {}
        for name in ("as torch chooses", "CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            try:
                found[name] = round(_attention_microseconds(bench, name, batch, tokens), 1)
            except RuntimeError as error:
                found[name] = f"refused: {str(error).strip().splitlines()[0]}"
        bench.note(section, f"microseconds, batch {batch}, {tokens} tokens", found)
    rates = bench.record.section("engine").get("rates", {})
    times = section[f"microseconds, batch {batch}, {_TOKENS[0]} tokens"]
    if "ours resident" in rates:
        bench.note(section, "verdict", attention_verdict(times, batch, rates["ours resident"]))


def _attention_microseconds(bench: Bench, name: str, batch: int, tokens: int) -> float:
    import torch  # noqa: PLC0415
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415
    from torch.nn.functional import scaled_dot_product_attention  # noqa: PLC0415

    device, dtype = torch.device(bench.arguments.device), getattr(torch, bench.arguments.dtype)
    heads, width = (12, 64) if not bench.arguments.smoke else (2, 16)
    # As one product gives them: queries, keys and values of a token beside each other.
    joined = torch.randn(batch, tokens, 3, heads, width, device=device, dtype=dtype)
    queries, keys, values = joined.permute(2, 0, 3, 1, 4).unbind(0)
    chosen: AbstractContextManager[Any]
    chosen = sdpa_kernel([SDPBackend.__members__[name]]) if name in SDPBackend.__members__ else nullcontext()
    calls = 2 if bench.arguments.smoke else _CALLS
    with torch.inference_mode(), chosen:
        for warm in (True, False):
            began = time.perf_counter()
            for _ in range(calls):
                scaled_dot_product_attention(queries, keys, values)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if not warm:
                return 1e6 * (time.perf_counter() - began) / calls
    raise AssertionError


def attention_verdict(times: Mapping[str, float | str], batch: int, rate: float, depth: int = 12) -> str:
    """Say which kernel is the fastest, and how much of a batch it would save beside flash attention.

    Args:
        times: microseconds of a layer's attention, or why there are none.
        rate: images per second of the model.
    """
    known = {name: time for name, time in times.items() if isinstance(time, float) and name != "as torch chooses"}
    if "FLASH_ATTENTION" not in known:
        return "flash attention does not run here"
    best = min(known, key=lambda name: known[name])
    saved = depth * (known["FLASH_ATTENTION"] - known[best]) / (1e6 * batch / rate)
    return f"{best} is the fastest; beside FLASH_ATTENTION it saves {saved:.1%} of a batch of {batch}"


def mixed(bench: Bench) -> None:
    """Batches of every size, padded to the sizes that a service without settings launches."""
    variant, _ = bench.best_of_ours()
    ours = bench.ours(variant)
    found = ours.mixed_rate(bench.seconds) | {"sizes": ours.predictor.batch_sizes}
    bench.note(bench.record.section("mixed"), variant, found)


def tests(bench: Bench) -> None:
    """The tests that need CUDA; under compute-sanitizer too, where it is installed and there is time."""
    section = bench.record.section("tests")
    files = [file for file in _TESTED if (REPOSITORY / file).exists()]
    plain = [sys.executable, *TESTS, *(_TESTED_IN_SMOKE if bench.arguments.smoke else files)]
    began = time.monotonic()
    bench.note(section, "plain", _run(plain, bench.left() - 5))
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None or bench.left() < 10 * (time.monotonic() - began):
        bench.note(section, "compute-sanitizer", "not installed" if sanitizer is None else "left out: no time")
    else:
        command = [sanitizer, "--error-exitcode", "99", *plain]
        bench.note(section, "compute-sanitizer", _run(command, bench.left() - 5))
    failed = [name for name, found in section.items() if isinstance(found, dict) and found["exit"]]
    if failed:
        raise RuntimeError(f"tests failed ({', '.join(failed)}); the record has the end of their output")


def _run(command: list[str], timeout: float) -> dict[str, Any]:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return {"exit": -1, "output": f"not done within {timeout:.0f} s: {output[-3000:]}"}
    return {"exit": done.returncode, "output": (done.stdout + done.stderr)[-4000:]}


def _subjects(bench: Bench, ours: Any, count: int) -> Any:
    """The photographs as the model sees them, and noise."""
    from benchmarks.gpu_engine import random_pictures  # noqa: PLC0415
    from model.images.preprocess import preprocess  # noqa: PLC0415

    pictures = random_pictures(ours.checkpoint, count, seed=9)
    for index, file in enumerate(bench.files[:count]):
        pictures[index] = preprocess(file.read_bytes(), ours.checkpoint.preprocess)
    return pictures
