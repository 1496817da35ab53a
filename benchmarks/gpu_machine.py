"""The GPU as a thing: what it is, what it does while something is measured, and which kernels a batch runs."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_QUERY = "memory.used,clocks.sm,power.draw,temperature.gpu"
_EVERY = 0.5
"""Seconds between two readings."""
_PATIENCE = 10
"""Seconds that a reading may take."""

KINDS: Mapping[str, re.Pattern[str]] = {
    "attention": re.compile(r"flash|fmha|scaled_dot_product|attention|cudnn.*sdpa", re.IGNORECASE),
    "GELU": re.compile(r"^(?!.*(gemm|nvjet|cutlass|_tem_)).*gelu", re.IGNORECASE),
    "products": re.compile(r"gemm|nvjet|cutlass|xmma|cublas|addmm|::b?mm|linear|conv|triton_tem", re.IGNORECASE),
    "normalisation": re.compile(r"layer_norm|layernorm|native_norm", re.IGNORECASE),
    "scores": re.compile(r"softmax|topk|sort|gatherTopK", re.IGNORECASE),
    "copies": re.compile(r"memcpy|memset|copy", re.IGNORECASE),
}
"""What a kernel is for, by its name; the first that fits."""


def facts(device: str) -> dict[str, Any]:
    """Name, driver and memory of the device, and what torch was built for."""
    import torch  # noqa: PLC0415  takes seconds to import

    if not device.startswith("cuda"):
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(torch.device(device))
    found = {
        "name": properties.name,
        "uuid": f"GPU-{properties.uuid}",
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


def listing() -> str:
    """What `nvidia-smi` prints, or why it prints nothing."""
    try:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"
    return done.stdout + done.stderr


@contextmanager
def meter(gpu: str | None) -> Iterator[dict[str, float]]:
    """Watch memory, clock, power and temperature by `nvidia-smi`; the dictionary is filled when the block ends.

    It stays empty without a GPU's id, and where `nvidia-smi` is not there or reads nothing.
    """
    found: dict[str, float] = {}
    if gpu is None:
        yield found
        return
    lines: list[str] = []
    stop = threading.Event()
    reader = threading.Thread(target=_read, args=(gpu, lines, stop), daemon=True)
    reader.start()
    try:
        yield found
    finally:
        stop.set()
        reader.join(2 * _PATIENCE)
        found |= _summary(lines)


def _read(gpu: str, lines: list[str], stop: threading.Event) -> None:
    # One process a reading: of one that loops, the last lines may be lost in its buffer.
    command = ["nvidia-smi", f"--id={gpu}", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    while True:
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE)
        except (OSError, subprocess.TimeoutExpired):
            return
        lines += done.stdout.splitlines()
        if stop.wait(_EVERY):
            return


def _summary(lines: list[str]) -> dict[str, float]:
    rows: list[list[float]] = []
    for line in lines:
        fields = line.split(",")
        try:
            rows += [[float(field) for field in fields]] if len(fields) == _QUERY.count(",") + 1 else []
        except ValueError:  # a field that the GPU does not have
            continue
    if not rows:
        return {}
    memory, clock, power, temperature = ([row[column] for row in rows] for column in range(4))
    return {
        "peak_memory_mib": max(memory),
        "clock_mhz_lowest": min(clock),
        "clock_mhz_highest": max(clock),
        "power_watts_mean": round(sum(power) / len(power), 1),
        "power_watts_peak": max(power),
        "temperature_peak": max(temperature),
        "readings": len(rows),
    }


def kernels(work: Callable[[], Any], device: str) -> dict[str, Any]:
    """Profile one call: shares of the device's time by kind, and the kernels that take most of it."""
    import torch  # noqa: PLC0415  takes seconds to import
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    on_gpu = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    times = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in seen.key_averages()
    }
    return shares({name: float(time) for name, time in times.items() if time > 0})


def shares(times: Mapping[str, float]) -> dict[str, Any]:
    """Sort kernels by what they are for.

    Args:
        times: microseconds by name.
    """
    total = sum(times.values())
    if not total:
        raise RuntimeError("the profile holds no kernel: has the driver's profiler been allowed to this user?")
    kinds = dict.fromkeys([*KINDS, "other"], 0.0)
    for name, time in times.items():
        kinds[next((kind for kind, pattern in KINDS.items() if pattern.search(name)), "other")] += time
    largest = sorted(times, key=lambda name: -times[name])[:15]
    return {
        "microseconds": round(total, 1),
        "shares": {kind: round(time / total, 4) for kind, time in kinds.items()},
        "largest": {name[:160]: round(times[name] / total, 4) for name in largest},
    }
