"""GPU metrics from NVIDIA's management library.

Each GPU has a thread of its own, so that a hanging driver stops no other work. The metrics need the
extra `gpu` (nvidia-ml-py) and a driver. Otherwise they are absent, and the log says so once.
"""

import importlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from service.background import supervised_thread

logger = logging.getLogger(__name__)

_READ: Final[dict[str, Callable[[Any, Any], float]]] = {
    "vit_gpu_utilization_ratio": lambda nvml, gpu: (
        nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
    ),
    "vit_gpu_memory_used_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    "vit_gpu_memory_total_bytes": lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    "vit_gpu_power_watts": lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
}
_AGE: Final = "vit_gpu_reading_age_seconds"
GAUGES: Final = {
    "vit_gpu_utilization_ratio": "Share of time in which a kernel ran",
    "vit_gpu_memory_used_bytes": "Memory in use by all processes",
    "vit_gpu_memory_total_bytes": "Total memory",
    "vit_gpu_power_watts": "Power drawn",
    _AGE: "Time since the last reading of the GPU's metrics",
}
"""Help text of each metric."""


class GpuReader:
    """Reads utilisation, memory and power of the serving GPUs at an interval.

    Args:
        interval: seconds between readings.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._watched: set[str] = set()
        self._readings: dict[str, tuple[float, dict[str, float]]] = {}

    def watch(self, device: str, uuid: str | None) -> None:
        """Start reading the GPU of a CUDA device. No effect if it is already read.

        Args:
            device: `cuda:N`; N names the GPU in `samples`.
            uuid: CUDA's identifier of the GPU or MIG instance, because NVML numbers GPUs
                differently; None on a CPU.
        """
        if uuid is None or uuid in self._watched:
            return
        self._watched.add(uuid)
        supervised_thread(
            "gpu-metrics", partial(self._read, device.removeprefix("cuda:"), uuid)
        ).start()

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the last readings and their age, by metric and GPU.

        Omits the metrics that a GPU or its driver does not support.
        """
        by_metric: dict[str, dict[tuple[str, ...], float]] = {}
        for number, (read_at, values) in list(self._readings.items()):
            age = self._clock() - read_at
            for name, value in {**values, _AGE: age}.items():
                by_metric.setdefault(name, {})[number,] = value
        return by_metric

    def _read(self, number: str, uuid: str) -> None:
        """Read every gauge of a GPU at the interval; return if NVML or the GPU is unavailable."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            gpu = _handle(nvml, uuid)
        except Exception as error:  # noqa: BLE001  the module of `NVMLError` may be missing
            logger.warning("no GPU metrics: they need the extra `gpu`: %s", error)
            return
        while True:
            values: dict[str, float] = {}
            for name, read in _READ.items():
                with suppress(nvml.NVMLError):
                    values[name] = read(nvml, gpu)
            if values:
                self._readings[number] = self._clock(), values
            time.sleep(self._interval)


def _handle(nvml: Any, uuid: str) -> Any:
    """Return a GPU's handle; adds the prefix that CUDA's identifiers lack. Raises `NVMLError`."""
    if not uuid.startswith(("GPU-", "MIG-")):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        uuid = f"MIG-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(uuid)
