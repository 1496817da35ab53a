"""GPU metrics against a stand-in for NVIDIA's management library, as few machines have the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from service.gpu_metrics import watch_gpu


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    handles = {"GPU-abc": "handle"}

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


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.split(" ") for line in lines)}


def test_readings_are_in_base_units_and_labelled_by_cuda_index(nvml: ModuleType) -> None:
    registry = CollectorRegistry()
    assert watch_gpu(registry, "cuda:1", "abc")
    assert scrape(registry) == {
        'vit_gpu_utilization_ratio{gpu="1"}': 0.42,
        'vit_gpu_memory_used_bytes{gpu="1"}': 3.0,
        'vit_gpu_memory_total_bytes{gpu="1"}': 7.0,
        'vit_gpu_power_watts{gpu="1"}': 123.4,
    }


def test_a_reading_that_the_driver_refuses_is_left_out(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> float:
        raise nvml.NVMLError("Not Supported")

    monkeypatch.setattr(nvml, "nvmlDeviceGetPowerUsage", refuse)
    registry = CollectorRegistry()
    watch_gpu(registry, "cuda:0", "abc")
    assert "vit_gpu_power_watts" not in str(scrape(registry))
    assert len(scrape(registry)) == 3


def test_an_unknown_gpu_or_a_cpu_adds_nothing(nvml: ModuleType) -> None:
    registry = CollectorRegistry()
    assert not watch_gpu(registry, "cuda:0", "xyz")
    assert not watch_gpu(registry, "cpu", None)
    assert scrape(registry) == {}


def test_a_machine_without_the_library_serves_without_these_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert not watch_gpu(CollectorRegistry(), "cuda:0", "abc")
