import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from prometheus_client import generate_latest, values
from prometheus_client.parser import text_string_to_metric_families
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from service.engine.messages import BatchReport, EngineStatus
from service.observe import logs
from service.observe.gpus import GpuReader
from service.observe.metrics import Metrics
from service.observe.state import Sources
from tests.launcher import until
from tests.service.fakes import PATIENCE, model_info
from vitserve.documents import ListedModel

COUNTERS = {
    "vit_requests_total": {"endpoint", "code"},
    "vit_images_total": {"model"},
    "vit_abstained_total": set(),
    "vit_decoder_restarts_total": set(),
    "vit_log_lines_dropped_total": set(),
    "vit_task_restarts_total": {"task"},
    "vit_batches_total": {"device", "release"},
    "vit_batch_padding_total": {"device"},
    "vit_rejected_total": {"reason"},
    "vit_cancelled_total": set(),
    "vit_engine_restarts_total": {"device"},
    "vit_recent_evicted_total": set(),
    "vit_recent_errors_total": set(),
    "vit_key_requests_total": {"key", "code"},
    "vit_reloads_total": {"outcome"},
    "vit_model_loads_total": {"result"},
    "vit_model_evictions_total": set(),
}
GAUGES = {
    "vit_queue_depth": {"device"},
    "vit_inflight_requests": set(),
    "vit_engine_up": {"device"},
    "vit_model_info": {
        "model",
        "architecture",
        "device",
        "dtype",
        "version",
        "checkpoint",
        "content",
    },
    "vit_model_loaded_timestamp_seconds": {"device"},
    "vit_last_reload_successful": {"model"},
    "vit_backbone_bytes": {"backbone"},
    "vit_model_state": {"model", "state"},
    "vit_recent_images": set(),
    "vit_recent_bytes": set(),
    "vit_recent_ttl_seconds": set(),
    "vit_admitted_images": set(),
    "vit_key_inflight_requests": {"key"},
    "vit_admitted_images_limit": set(),
}
HISTOGRAMS = {
    "vit_request_duration_seconds": {"endpoint"},
    "vit_stage_duration_seconds": {"stage"},
    "vit_batch_size": {"device"},
    "vit_top1_score": {"model"},
    "vit_image_duration_seconds": {"model"},
    "vit_recent_evicted_age_seconds": set(),
}


def status(state: str = "ready", device: str = "cpu", depth: int = 0) -> EngineStatus:
    return EngineStatus(device, state, "", "off", None, depth)  # type: ignore[arg-type]


def listed(name: str, state: str) -> ListedModel:
    return ListedModel(
        name=name, state=state, reason="", backbone="b", bytes=9, default=False, taught=False
    )


def touched(*devices: str, folder: Path | None = None) -> Metrics:
    """Return metrics that have each series, of engines of which each has a longer queue than the
    one before.
    """
    metrics = Metrics(folder)
    engines = [status(device=device, depth=2 * place) for place, device in enumerate(devices)]
    metrics.watch(
        Sources(
            lambda: engines,
            lambda: (1, 2, 3),
            lambda: (4, 5),
            models=lambda: [listed("cats", "ready")],
            reloads=lambda: {"cats": True},
        )
    )
    metrics.set_models([model_info(device=device) for device in devices], "1.2.3")
    metrics.requests.labels("/classify", "200")
    metrics.request_duration.labels("/classify")
    metrics.stage_duration.labels("decode")
    metrics.rejected.labels("queue_full")
    metrics.key_requests.labels("key1", "200")
    metrics.key_inflight.labels("key1")
    metrics.task_restarts.labels("heartbeat")
    metrics.observe_batch(BatchReport(devices[0], 0, 0, "idle"))
    return metrics


def families(metrics: Metrics) -> dict[str, tuple[str, dict[str, set[str]]]]:
    """Return each family's name with its type and its samples' names and labels."""
    return {
        family.name: (family.type, {sample.name: set(sample.labels) for sample in family.samples})
        for family in text_string_to_metric_families(generate_latest(metrics).decode())
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_picture_counts_begin_at_zero() -> None:
    assert value(touched("cpu"), "vit_images_total", model=model_info().name) == 0


def test_a_scrape_reads_engine_gauges() -> None:
    now = status("loading", device="auto")
    metrics = Metrics()
    metrics.watch(Sources(lambda: [now]))
    assert value(metrics, "vit_engine_up", device="auto") == 0
    now = status("ready", device="cuda:0", depth=7)
    assert value(metrics, "vit_engine_up", device="cuda:0") == 1
    assert value(metrics, "vit_queue_depth", device="cuda:0") == 7
    assert value(metrics, "vit_engine_up", device="auto") is None
    now = status("failed", device="cuda:0")
    assert value(metrics, "vit_engine_up", device="cuda:0") == 0


def test_the_latency_of_a_model_ends_with_it() -> None:
    models = [listed("cats", "ready"), listed("dogs", "ready")]
    metrics = Metrics()
    metrics.watch(Sources(models=lambda: models))
    metrics.count_image("cats", seconds=0.3)
    metrics.count_image("dogs", seconds=0.4)
    metrics.count_image("dogs")
    assert scraped(metrics, "vit_image_duration_seconds_count", model="dogs") == 1
    assert scraped(metrics, "vit_image_duration_seconds_sum", model="cats") == 0.3
    del models[1]
    assert "dogs" not in generate_latest(metrics).decode()


def test_each_model_has_its_own_reloads() -> None:
    reloads = {"cats": False, "dogs": True}
    metrics = Metrics()
    metrics.watch(Sources(reloads=lambda: reloads))
    assert value(metrics, "vit_last_reload_successful", model="cats") == 0
    assert value(metrics, "vit_last_reload_successful", model="dogs") == 1
    del reloads["cats"]
    assert value(metrics, "vit_last_reload_successful", model="cats") is None


def test_a_model_has_exactly_one_state() -> None:
    models = [listed("cats", "ready"), listed("dogs", "failed")]
    metrics = Metrics()
    metrics.watch(Sources(models=lambda: models))
    assert value(metrics, "vit_model_state", model="dogs", state="failed") == 1
    assert value(metrics, "vit_model_state", model="dogs", state="ready") == 0
    del models[1]
    assert value(metrics, "vit_model_state", model="dogs", state="failed") is None
    assert value(metrics, "vit_model_state", model="cats", state="ready") == 1


@pytest.fixture
def count_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Metrics]:
    """Return what makes the metrics of one process among several that count in the same folder."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")

    def start(name: str) -> Metrics:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: name))
        return touched("cuda:0", "cuda:1", folder=tmp_path)

    return start


def scraped(metrics: Metrics, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in text_string_to_metric_families(generate_latest(metrics).decode())
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return float(found)


def test_scrape_adds_up_all_processes(count_as: Callable[[str], Metrics]) -> None:
    one = count_as("worker-0")
    two = count_as("worker-1")
    for number, metrics in enumerate((one, two), start=1):
        for _ in range(number):
            metrics.count_image("cats")
        metrics.inflight.inc(number)
        metrics.requests.labels("/classify", "200").inc(number)
        metrics.request_duration.labels("/classify").observe(0.1 * number)
        metrics.publish()
    sums: dict[str, tuple[float, dict[str, str]]] = {
        "vit_images_total": (3, {"model": "cats"}),
        "vit_inflight_requests": (3, {}),
        "vit_requests_total": (3, {"endpoint": "/classify", "code": "200"}),
        "vit_request_duration_seconds_count": (2, {"endpoint": "/classify"}),
        "vit_request_duration_seconds_bucket": (1, {"endpoint": "/classify", "le": "0.1"}),
        "vit_engine_up": (1, {"device": "cuda:1"}),
        "vit_queue_depth": (2, {"device": "cuda:1"}),
        "vit_recent_bytes": (2, {}),
        "vit_recent_evicted_total": (3, {}),
        "vit_admitted_images": (8, {}),
        "vit_admitted_images_limit": (10, {}),
    }
    for metrics in (one, two):
        assert {
            name: (scraped(metrics, name, **labels), labels) for name, (_, labels) in sums.items()
        } == sums


def test_added_metrics_are_summed(count_as: Callable[[str], Metrics]) -> None:
    for name in ("worker-0", "worker-1"):
        metrics = count_as(name)
        metrics.counter("audit_lines_total", "Written lines", ["kind"]).labels("answer").inc(2)
        metrics.gauge("audit_files", "Open files").inc()
        metrics.histogram("audit_seconds", "Time of a line").observe(0.1)

    assert scraped(metrics, "audit_lines_total", kind="answer") == 4
    assert scraped(metrics, "audit_files") == 2
    assert scraped(metrics, "audit_seconds_count") == 2


def test_an_added_metric_is_shown() -> None:
    metrics = Metrics()
    metrics.counter("audit_lines_total", "Written lines").inc()

    assert scraped(metrics, "audit_lines_total") == 1


@pytest.mark.parametrize("several", [False, True], ids=["one process", "several"])
def test_families_are_stable_for_dashboards(
    several: bool, count_as: Callable[[str], Metrics]
) -> None:
    counting = count_as("engine-0") if several else touched("cpu")
    counting.count_image("cats")
    found = families(count_as("worker-0") if several else counting)
    for kind, documented in (("counter", COUNTERS), ("gauge", GAUGES)):
        for name, labels in documented.items():
            assert found.pop(name.removesuffix("_total")) == (kind, {name: labels})
    for name, labels in HISTOGRAMS.items():
        samples = {
            f"{name}_bucket": {*labels, "le"},
            f"{name}_sum": labels,
            f"{name}_count": labels,
        }
        assert found.pop(name) == ("histogram", samples)
    assert not [name for name in found if several or name.startswith("vit_")]


@pytest.fixture
def configured(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure("text", "info")


def test_form_parser_does_not_log(configured: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FormParserError):
        MultipartParser(b"boundary", {}).write(b"--bogus\r\n")
    assert capsys.readouterr().err == ""


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

    vars(module).update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=42),
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=3, total=7),
        nvmlDeviceGetPowerUsage=lambda _: 123_400,
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture
def gpus(nvml: ModuleType) -> GpuReader:
    """A collector whose threads read once."""
    return GpuReader(interval=3600.0, clock=lambda: 100.0)


def scrape(gpus: GpuReader) -> dict[str, float]:
    return {
        f"{name} {gpu}": value
        for name, samples in gpus.samples().items()
        for (gpu,), value in samples.items()
    }


def scrape_of(gpus: GpuReader, samples: int) -> dict[str, float]:
    """What is scraped once that many samples are there."""
    until(lambda: len(scrape(gpus)) == samples)
    return scrape(gpus)


def test_gpu_readings_are_in_base_units(gpus: GpuReader) -> None:
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
def test_a_mig_instance_is_read_as_a_gpu(uuid: str, gpus: GpuReader) -> None:
    gpus.watch("cuda:MIG-123", uuid)
    assert scrape_of(gpus, 5)["vit_gpu_memory_used_bytes MIG-123"] == 3


@pytest.mark.parametrize("missing", ["the library", "the GPU"])
def test_unreadable_gpu_has_no_metrics(
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


@pytest.mark.parametrize(
    "question", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage"]
)
def test_hanging_driver_stops_no_scrape(
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
