"""GPU metrics against a stand-in for NVIDIA's management library, as few machines have the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from service.metrics.nvml import GpuCollector


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    handles = {"GPU-abc": "handle", "GPU-def": "another"}

    class NVMLError(Exception):
        pass

    def handle_of(uuid: str) -> str:
        if uuid not in handles:
            raise NVMLError("Not Found")
        return handles[uuid]

    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    module.nvmlInit = lambda: None  # type: ignore[attr-defined]
    module.nvmlDeviceGetHandleByUUID = handle_of  # type: ignore[attr-defined]
    module.nvmlDeviceGetUtilizationRates = lambda _: SimpleNamespace(gpu=42)  # type: ignore[attr-defined]
    module.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(used=3, total=7)  # type: ignore[attr-defined]
    module.nvmlDeviceGetPowerUsage = lambda _: 123_400  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def scrape(gpus: GpuCollector) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(gpus)
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split(" ") for line in lines)}


def test_readings_are_in_base_units_and_labelled_by_cuda_index(nvml: ModuleType) -> None:
    gpus = GpuCollector()
    assert gpus.watch("cuda:1", "abc")
    assert scrape(gpus) == {
        'vit_gpu_utilization_ratio{gpu="1"}': 0.42,
        'vit_gpu_memory_used_bytes{gpu="1"}': 3.0,
        'vit_gpu_memory_total_bytes{gpu="1"}': 7.0,
        'vit_gpu_power_watts{gpu="1"}': 123.4,
    }


def test_two_gpus_are_two_samples_of_each_metric(nvml: ModuleType) -> None:
    gpus = GpuCollector()
    for device in ("cuda:0", "cuda:1", "cuda:1"):
        assert gpus.watch(device, {"cuda:0": "abc", "cuda:1": "def"}[device])
    samples = scrape(gpus)
    assert len(samples) == 8
    assert {'vit_gpu_utilization_ratio{gpu="0"}', 'vit_gpu_utilization_ratio{gpu="1"}'} <= set(samples)


def test_a_reading_that_the_driver_refuses_is_left_out(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> float:
        raise nvml.NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", refuse)
    gpus = GpuCollector()
    gpus.watch("cuda:0", "abc")
    assert "vit_gpu_power_watts" not in str(scrape(gpus))
    assert len(scrape(gpus)) == 3


def test_an_unknown_gpu_or_a_cpu_adds_nothing(nvml: ModuleType) -> None:
    gpus = GpuCollector()
    assert not gpus.watch("cuda:0", "xyz")
    assert not gpus.watch("cpu", None)
    assert scrape(gpus) == {}


def test_a_machine_without_the_library_serves_without_these_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not GpuCollector().watch("cuda:0", "abc")
