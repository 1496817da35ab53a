"""GPU metrics, read from NVIDIA's management library at each scrape.

It needs the extra `gpu` (nvidia-ml-py). Without it, or without a driver, the metrics are absent and the
log says so once: a zero would be a lie.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_GAUGES: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
    (
        "vit_gpu_utilization_ratio",
        "Share of time in which a kernel ran",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    (
        "vit_gpu_memory_used_bytes",
        "Memory in use, by anyone",
        lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
    ),
    ("vit_gpu_memory_total_bytes", "Memory", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    ("vit_gpu_power_watts", "Power drawn", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
)


class GpuCollector(Collector):
    """Utilisation, memory and power of the GPUs that serve: each metric once, with a sample a GPU.

    The module `nvml` is by default `pynvml`, imported for the first GPU.
    """

    def __init__(self, nvml: Any = None) -> None:
        self._nvml = nvml
        self._handles: dict[str, tuple[str, Any] | None] = {}

    def watch(self, device: str, uuid: str | None) -> bool:
        """Add the GPU behind a CUDA device, if it is not there yet, and return whether it has metrics.

        Args:
            device: `cuda:N`; N labels the samples.
            uuid: of that GPU as CUDA reports it, as NVML numbers GPUs differently; None on a CPU.
        """
        if uuid is None:
            return False
        if uuid not in self._handles:
            handle = self._handle(uuid)
            self._handles[uuid] = None if handle is None else (device.removeprefix("cuda:"), handle)
        return self._handles[uuid] is not None

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Return nothing: which names can be measured is only known when they are measured."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Read every gauge of every GPU; readings that a GPU or its driver lacks are left out."""
        for name, description, read in _GAUGES:
            family = GaugeMetricFamily(name, description, labels=["gpu"])
            for number, handle in filter(None, self._handles.values()):
                try:
                    family.add_metric([number], read(self._nvml, handle))
                except self._nvml.NVMLError as error:
                    logger.debug("%s of GPU %s: %s", name, number, error)
            if family.samples:
                yield family

    def _handle(self, uuid: str) -> Any:
        """Return the GPU's handle, or None with a line in the log where nothing can be read."""
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
        except ImportError:
            logger.warning("no GPU metrics: install the extra `gpu` (nvidia-ml-py)")
            return None
        try:
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError as error:
            logger.warning("no GPU metrics: %s", error)
            return None
