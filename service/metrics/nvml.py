"""What NVIDIA's management library says of the GPU that serves, read at each scrape.

Needs the extra `gpu` (nvidia-ml-py). Without it, or without a driver, the metrics are absent and the
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


class GpuCollector(Collector):
    """Utilisation, memory and power of one GPU.

    Args:
        nvml: the module `pynvml`, initialised.
        uuid: of the GPU as CUDA reports it; NVML numbers GPUs differently from CUDA.
        gpu: label value, the CUDA index.
    """

    def __init__(self, nvml: Any, uuid: str, gpu: str) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: names are only known to be measurable when they are measured."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One reading of each; what this GPU or driver cannot tell is left out."""
        nvml, handle = self._nvml, self._handle
        readings: tuple[tuple[str, str, Callable[[], float]], ...] = (
            (
                "vit_gpu_utilization_ratio",
                "Share of time in which a kernel ran",
                lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            ),
            (
                "vit_gpu_memory_used_bytes",
                "Memory in use, by anyone",
                lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            ),
            ("vit_gpu_memory_total_bytes", "Memory", lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
            ("vit_gpu_power_watts", "Power drawn", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
        )
        for name, what, read in readings:
            family = GaugeMetricFamily(name, what, labels=["gpu"])
            try:
                family.add_metric([self._gpu], read())
            except nvml.NVMLError as error:
                logger.debug("%s: %s", name, error)
                continue
            yield family


class Gpus(Collector):
    """The GPUs that serve: each metric once, with a sample a GPU."""

    def __init__(self) -> None:
        self._collectors: dict[str, GpuCollector | None] = {}

    def watch(self, device: str, uuid: str | None) -> bool:
        """Add the GPU behind a CUDA device, if it is not there yet.

        Args:
            device: `cuda:N`.
            uuid: of that GPU; None on a CPU.

        Returns:
            Whether its metrics are told.
        """
        if uuid is None:
            return False
        if uuid not in self._collectors:
            self._collectors[uuid] = _gpu_collector(device, uuid)
        return self._collectors[uuid] is not None

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: names are only known to be measurable when they are measured."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """One reading of each GPU."""
        families: dict[str, GaugeMetricFamily] = {}
        for collector in self._collectors.values():
            for family in collector.collect() if collector else ():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()


def _gpu_collector(device: str, uuid: str) -> GpuCollector | None:
    """Of one GPU; None, and a line in the log, where nothing can be read."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        logger.warning("no GPU metrics: install the extra `gpu` (nvidia-ml-py)")
        return None
    try:
        nvml.nvmlInit()
        return GpuCollector(nvml, uuid, device.removeprefix("cuda:"))
    except nvml.NVMLError as error:
        logger.warning("no GPU metrics: %s", error)
        return None
