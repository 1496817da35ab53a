"""GPU metrics, read from NVIDIA's management library on a thread of their own.

    event loop                        thread
    ----------                        ------
    watch() -> GPUs          -->      every `interval` seconds: read all gauges of all GPUs
    collect() <- last readings  <--     (a driver that hangs stops this thread and nothing else)

Readings are shown with their age, which grows when the driver no longer answers. It needs the extra `gpu`
(nvidia-ml-py). Without it, or without a driver, the metrics are absent and the log says so once: a zero would be a lie.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_GAUGES: dict[str, tuple[str, Callable[[Any, Any], float]]] = {
    "vit_gpu_utilization_ratio": (
        "Share of time in which a kernel ran",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    "vit_gpu_memory_used_bytes": (
        "Memory in use, by anyone",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    "vit_gpu_memory_total_bytes": ("Memory", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    "vit_gpu_power_watts": ("Power drawn", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
}
_AGE = "vit_gpu_reading_age_seconds"


class _Reading(NamedTuple):
    at: float
    values: dict[str, float]


class GpuCollector(Collector):
    """Utilisation, memory and power of the GPUs that serve: each metric once, with a sample a GPU.

    Args:
        nvml: by default `pynvml`, imported for the first GPU.
        interval: seconds between readings.
        clock: monotonic seconds.
    """

    def __init__(self, nvml: Any = None, *, interval: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml = nvml
        self._interval = interval
        self._clock = clock
        self._gpus: dict[str, str] = {}
        self._handles: dict[str, Any] = {}
        self._readings: dict[str, _Reading] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, device: str, uuid: str | None) -> None:
        """Read the GPU behind a CUDA device from now on, if it is not read yet.

        Args:
            device: `cuda:N`; N labels the samples.
            uuid: of that GPU, or instance of MIG, as CUDA reports it, as NVML numbers GPUs differently; None on a CPU.
        """
        if uuid is None or uuid in self._gpus:
            return
        self._gpus[uuid] = device.removeprefix("cuda:")
        self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._read_for_ever, name="gpu-metrics", daemon=True)
            self._thread.start()

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return nothing: which names can be measured is only known when they are measured."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Return the last readings and their age, without a wait; what a GPU or its driver lacks is left out."""
        now, readings = self._clock(), dict(self._readings)
        for name, (description, _) in _GAUGES.items():
            family = GaugeMetricFamily(name, description, labels=["gpu"])
            for number, reading in readings.items():
                if name in reading.values:
                    family.add_metric([number], reading.values[name])
            if family.samples:
                yield family
        if readings:
            age = GaugeMetricFamily(_AGE, "Time since the GPU's metrics were read", labels=["gpu"])
            for number, reading in readings.items():
                age.add_metric([number], now - reading.at)
            yield age

    # The thread's side.

    def read(self) -> None:
        """Read every gauge of every GPU; blocks as long as the driver does."""
        for uuid, number in list(self._gpus.items()):
            if uuid not in self._handles:
                self._handles[uuid] = self._handle(uuid)
            if self._handles[uuid] is not None:
                values = self._values(number, self._handles[uuid])
                if values:
                    self._readings[number] = _Reading(self._clock(), values)

    def _read_for_ever(self) -> None:
        while True:
            self._wake.clear()
            self.read()
            self._wake.wait(self._interval)

    def _values(self, number: str, handle: Any) -> dict[str, float]:
        values = {}
        for name, (_, read) in _GAUGES.items():
            try:
                values[name] = read(self._nvml, handle)
            except self._nvml.NVMLError as error:
                logger.debug("%s of GPU %s: %s", name, number, error)
        return values

    def _handle(self, uuid: str) -> Any:
        """Return the GPU's handle, or None with a line in the log where nothing can be read."""
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            logger.warning("no GPU metrics: install the extra `gpu` (nvidia-ml-py)")
            return None
        reason: Exception | None = None
        for name in (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}"):
            try:
                self._nvml.nvmlInit()
                return self._nvml.nvmlDeviceGetHandleByUUID(name)
            except self._nvml.NVMLError as error:
                reason = reason or error
        logger.warning("no GPU metrics: %s", reason)
        return None
