"""The GPU as a thing: what it is, what it does while something is measured, and which kernels a batch runs."""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_EVERY = 0.2
"""Seconds between two readings."""

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
    try:
        nvml, _ = _nvml(str(found["uuid"]))
    except (ImportError, RuntimeError) as error:
        return found | {"driver": f"unknown: {error}"}
    return found | {"driver": str(nvml.nvmlSystemGetDriverVersion())}


def _nvml(gpu: str) -> tuple[Any, Any]:
    """NVIDIA's management library, at work, and its handle of a GPU.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        RuntimeError: the library is not there, does not work, or knows no such GPU.
    """
    nvml = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(gpu)
    except nvml.NVMLError as error:
        raise RuntimeError(f"NVML: {error}") from error


@contextmanager
def meter(gpu: str | None) -> Iterator[dict[str, Any]]:
    """Watch memory, clock, power and temperature by NVML; the dictionary is filled when the block ends.

    It stays empty without a GPU's id, and says why where NVML reads nothing.
    """
    found: dict[str, Any] = {}
    if gpu is None:
        yield found
        return
    try:
        nvml, handle = _nvml(gpu)
    except (ImportError, RuntimeError) as error:
        found["unknown"] = str(error)
        yield found
        return
    readings: list[dict[str, float]] = []
    stop = threading.Event()

    def read() -> None:
        while True:
            readings.append(_reading(nvml, handle))
            if stop.wait(_EVERY):
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield found
    finally:
        stop.set()
        reader.join(10)
        found |= _summary(readings)


def _reading(nvml: Any, handle: Any) -> dict[str, float]:
    """What the GPU says of itself now; what it does not have is absent."""
    sources: dict[str, Callable[[], float]] = {
        "memory_mib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20,
        "clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        "temperature": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    found = {}
    for name, source in sources.items():
        try:
            found[name] = float(source())
        except nvml.NVMLError:
            continue
    return found


def _summary(readings: Iterable[Mapping[str, float]]) -> dict[str, Any]:
    values: dict[str, list[float]] = {}
    for reading in readings:
        for name, value in reading.items():
            values.setdefault(name, []).append(value)
    spans = {name: [min(each), round(sum(each) / len(each), 1), max(each)] for name, each in values.items()}
    return {"least, mean, most": spans, "readings": max(map(len, values.values()), default=0)}


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
    return shares(kernel_times(seen.key_averages(), on_gpu=on_gpu))


def kernel_times(events: Iterable[Any], *, on_gpu: bool) -> dict[str, float]:
    """Return the microseconds of each kernel of a profile by its name; on a CPU those of each operator.

    An operator on the CPU is charged with the kernels that it launched, which are events of their own, so only those
    that ran on the device are counted there; ranges that somebody named are no kernels.
    """
    times: dict[str, float] = {}
    for event in events:
        if on_gpu and (event.device_type.name != "CUDA" or getattr(event, "is_user_annotation", False)):
            continue
        time = float(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
        if time > 0:
            times[event.key] = times.get(event.key, 0.0) + time
    return times


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
