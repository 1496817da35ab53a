"""GPU metrics against a stand-in for NVIDIA's management library, as few machines have the real one."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from service.observe.gpus import GpuReader
from tests.launcher import until
from tests.service.fakes import PATIENCE


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("pynvml")
    handles = {"GPU-abc": "handle", "GPU-def": "another", "MIG-123": "instance"}

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


@pytest.fixture
def gpus(nvml: ModuleType) -> GpuReader:
    """A collector whose threads read once."""
    return GpuReader(interval=3600.0, clock=lambda: 100.0)


def scrape(gpus: GpuReader) -> dict[str, float]:
    return {f"{name} {gpu}": value for name, samples in gpus.samples().items() for (gpu,), value in samples.items()}


def scrape_of(gpus: GpuReader, samples: int) -> dict[str, float]:
    """What is scraped once that many samples are there."""
    until(lambda: len(scrape(gpus)) == samples)
    return scrape(gpus)


def test_readings_are_in_base_units_and_labelled_by_cuda_index(gpus: GpuReader) -> None:
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        gpus.watch(device, {"cuda:0": "abc", "cuda:1": "def"}[device])
    samples = scrape_of(gpus, 10)
    assert {name: value for name, value in samples.items() if name.endswith(" 1")} == {
        "vit_gpu_utilization_ratio 1": 0.42,
        "vit_gpu_memory_used_bytes 1": 3.0,
        "vit_gpu_memory_total_bytes 1": 7.0,
        "vit_gpu_power_watts 1": 123.4,
        "vit_gpu_reading_age_seconds 1": 0.0,
    }


@pytest.mark.parametrize("uuid", ["123", "MIG-123", "GPU-abc"])
def test_an_instance_of_mig_is_read_as_a_gpu_is(uuid: str, gpus: GpuReader) -> None:
    gpus.watch("cuda:MIG-123", uuid)
    assert scrape_of(gpus, 5)["vit_gpu_memory_used_bytes MIG-123"] == 3


@pytest.mark.parametrize("missing", ["the library", "the GPU"])
def test_where_nothing_can_be_read_there_are_no_metrics_and_one_line_says_so(
    missing: str, gpus: GpuReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if missing == "the library":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    gpus.watch("cpu", None)
    for _ in range(3):
        gpus.watch("cuda:0", "xyz")
    until(lambda: bool(caplog.records))
    assert scrape(gpus) == {}
    assert len(caplog.records) == 1


@pytest.mark.parametrize("question", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage"])
def test_a_driver_that_hangs_stops_no_scrape_and_holds_its_own_thread_alone(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    asked = threading.Event()

    def hang(*_: object) -> None:
        asked.set()
        threading.Event().wait()

    monkeypatch.setattr(nvml, question, hang)
    gpus = GpuReader(interval=0.0)
    before = set(threading.enumerate())
    gpus.watch("cuda:0", "abc")
    assert asked.wait(PATIENCE)
    assert scrape(gpus) == {}
    assert all(thread.daemon for thread in set(threading.enumerate()) - before)
