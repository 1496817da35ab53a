"""The GPU as a thing: what it is, what it does while something is measured, and which kernels a batch runs."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

_EVERY = 0.2
"""Seconds between two readings."""


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


def _summary(readings: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return what was read once the device was at work: in the first quarter it may idle, with an idle clock."""
    values: dict[str, list[float]] = {}
    for reading in readings[len(readings) // 4 :]:
        for name, value in reading.items():
            values.setdefault(name, []).append(value)
    spans = {name: [min(each), round(sum(each) / len(each), 1), max(each)] for name, each in values.items()}
    return {"least, mean, most": spans, "readings": max(map(len, values.values()), default=0)}


def kernels(work: Callable[[], Any], device: str) -> str:
    """Profile one call; return torch's table of the kernels that take most of the device's time."""
    import torch  # noqa: PLC0415  takes seconds to import
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    on_gpu = device.startswith("cuda")
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize(device)
    order = "self_cuda_time_total" if on_gpu else "self_cpu_time_total"
    return str(seen.key_averages().table(sort_by=order, row_limit=25, max_name_column_width=100))
