"""GPU metrics, read from NVIDIA's management library by a thread for each GPU: a driver that hangs
stops nothing else.

It needs the extra `gpu` (nvidia-ml-py). Without it, or without a driver, the metrics are absent and
the log says so once: a zero would be a lie.
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
    "vit_gpu_memory_used_bytes": "Memory in use, by anyone",
    "vit_gpu_memory_total_bytes": "Memory",
    "vit_gpu_power_watts": "Power drawn",
    _AGE: "Time since the GPU's metrics were read",
}
"""Name of each metric, and its description."""


class GpuReader:
    """Reads utilisation, memory and power of the GPUs that serve, again and again.

    Args:
        interval: seconds between readings.
        clock: monotonic seconds.
    """

    def __init__(
        self, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval, self._clock = interval, clock
        self._watched: set[str] = set()
        self._readings: dict[str, tuple[float, dict[str, float]]] = {}

    def watch(self, device: str, uuid: str | None) -> None:
        """Read the GPU behind a CUDA device from now on, if it is not read yet.

        Args:
            device: `cuda:N`; N names the GPU in `samples`.
            uuid: of that GPU, or instance of MIG, as CUDA reports it, as NVML numbers GPUs
            differently; None on a CPU.
        """
        if uuid is None or uuid in self._watched:
            return
        self._watched.add(uuid)
        supervised_thread(
            "gpu-metrics", partial(self._read, device.removeprefix("cuda:"), uuid)
        ).start()

    def samples(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Return the last readings and their age, by metric and GPU; what a GPU or its driver lacks
        is left out.
        """
        found: dict[str, dict[tuple[str, ...], float]] = {}
        for number, (at, values) in list(self._readings.items()):
            for name, value in {**values, _AGE: self._clock() - at}.items():
                found.setdefault(name, {})[number,] = value
        return found

    def _read(self, number: str, uuid: str) -> None:
        """Read every gauge of a GPU again and again; the thread ends where nothing can be read."""
        try:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            gpu = _handle(nvml, uuid)
        except Exception as error:  # noqa: BLE001  `NVMLError`, whose module may be what is missing
            logger.warning("no GPU metrics, for which the extra `gpu` is needed: %s", error)
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
    """Return a GPU's handle; CUDA leaves the prefix of an identifier out. Raises `NVMLError`."""
    if not uuid.startswith(("GPU-", "MIG-")):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        uuid = f"MIG-{uuid}"
    return nvml.nvmlDeviceGetHandleByUUID(uuid)
