from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import values
from prometheus_client.parser import text_string_to_metric_families

from service.engine.messages import BatchReport, EngineStatus
from service.observe.metrics import Metrics, Sources
from tests.service.fakes import model_info

COUNTERS = {
    "vit_requests_total": {"endpoint", "code"},
    "vit_images_total": {"model"},
    "vit_abstained_total": set(),
    "vit_decoder_restarts_total": set(),
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
    "vit_model_info": {"model", "architecture", "device", "dtype", "version", "checkpoint", "content"},
    "vit_model_loaded_timestamp_seconds": {"device"},
    "vit_last_reload_successful": set(),
    "vit_backbone_bytes": {"backbone"},
    "vit_recent_images": set(),
    "vit_recent_bytes": set(),
    "vit_admitted_images": set(),
    "vit_key_inflight_requests": {"key"},
    "vit_admitted_images_limit": set(),
}
HISTOGRAMS = {
    "vit_request_duration_seconds": {"endpoint"},
    "vit_stage_duration_seconds": {"stage"},
    "vit_batch_size": {"device"},
    "vit_top1_score": {"model"},
}


def status(state: str = "ready", device: str = "cpu", depth: int = 0) -> EngineStatus:
    return EngineStatus(device, state, "", "off", None, depth)  # type: ignore[arg-type]


@pytest.fixture
def metrics() -> Metrics:
    """Return metrics with every series touched once."""
    metrics = Metrics()
    metrics.watch(
        Sources(
            lambda: [status()],
            lambda: (1, 2, 3),
            lambda: (4, 5),
            results=lambda: {"served": 2, "refused": 1, "last_refused": 1},
            backbones=lambda: {"b": 9},
        )
    )
    metrics.set_models([model_info()], "1.2.3")
    metrics.count_image("cats")
    metrics.requests.labels("/classify", "200").inc()
    metrics.request_duration.labels("/classify").observe(0.1)
    metrics.stage_duration.labels("decode").observe(0.1)
    metrics.rejected.labels("queue_full").inc()
    metrics.key_requests.labels("key1", "200").inc()
    metrics.key_inflight.labels("key1").inc()
    metrics.observe_batch(BatchReport("cpu", 3, 1, "idle", 0.01))
    return metrics


def families(metrics: Metrics) -> dict[str, tuple[str, dict[str, set[str]]]]:
    """Return each family's name with its type and its samples' names and labels."""
    return {
        family.name: (family.type, {sample.name: set(sample.labels) for sample in family.samples})
        for family in text_string_to_metric_families(metrics.render().decode())
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_names_types_and_labels_are_those_that_dashboards_rely_on(metrics: Metrics) -> None:
    found = families(metrics)
    for name, labels in COUNTERS.items():
        kind, samples = found.pop(name.removesuffix("_total"))
        assert (kind, samples) == ("counter", {name: labels})
    for name, labels in GAUGES.items():
        kind, samples = found.pop(name)
        assert (kind, samples) == ("gauge", {name: labels})
    for name, labels in HISTOGRAMS.items():
        kind, samples = found.pop(name)
        assert kind == "histogram"
        assert samples == {f"{name}_bucket": {*labels, "le"}, f"{name}_sum": labels, f"{name}_count": labels}
    assert not [name for name in found if name.startswith("vit_")]


def test_the_engines_gauges_are_read_at_the_scrape_and_name_its_device_once_it_is_known() -> None:
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


@pytest.fixture
def count_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Metrics]:
    """Return what makes the metrics of one process among several that count in the same folder."""
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")

    def start(name: str) -> Metrics:
        monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
        monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: name))
        metrics = Metrics(tmp_path)
        engines = [status(device="cuda:0"), status(device="cuda:1", depth=2)]
        metrics.watch(Sources(lambda: engines, lambda: (1, 2, 3), lambda: (4, 5), backbones=lambda: {"b": 9}))
        metrics.set_models([model_info(device="cuda:0"), model_info(device="cuda:1")], "1.2.3")
        metrics.requests.labels("/classify", "200").inc(0)
        metrics.request_duration.labels("/classify")
        metrics.stage_duration.labels("decode")
        metrics.rejected.labels("queue_full").inc(0)
        metrics.key_requests.labels("key1", "200").inc(0)
        metrics.key_inflight.labels("key1").inc(0)
        metrics.observe_batch(BatchReport("cuda:0", 0, 0, "idle", 0.01))
        return metrics

    return start


def scraped(metrics: Metrics, name: str, **labels: str) -> float:
    [found] = [
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == name and sample.labels == labels
    ]
    return float(found)


def test_a_scrape_of_any_process_shows_the_sum_over_all(count_as: Callable[[str], Metrics]) -> None:
    one, two = count_as("worker-0"), count_as("worker-1")
    for number, metrics in enumerate((one, two), start=1):
        for _ in range(number):
            metrics.count_image("cats")
        metrics.inflight.inc(number)
        metrics.requests.labels("/classify", "200").inc(number)
        metrics.request_duration.labels("/classify").observe(0.1 * number)
        metrics.publish()
    for metrics in (one, two):
        assert scraped(metrics, "vit_images_total", model="cats") == 3
        assert scraped(metrics, "vit_inflight_requests") == 3
        assert scraped(metrics, "vit_requests_total", endpoint="/classify", code="200") == 3
        assert scraped(metrics, "vit_request_duration_seconds_count", endpoint="/classify") == 2
        assert scraped(metrics, "vit_request_duration_seconds_bucket", endpoint="/classify", le="0.1") == 1
        assert scraped(metrics, "vit_engine_up", device="cuda:1") == 1
        assert scraped(metrics, "vit_queue_depth", device="cuda:1") == 2
        assert scraped(metrics, "vit_recent_bytes") == 2
        assert scraped(metrics, "vit_recent_evicted_total") == 3
        assert scraped(metrics, "vit_admitted_images") == 8
        assert scraped(metrics, "vit_admitted_images_limit") == 10


def test_several_processes_have_the_names_and_labels_of_one(count_as: Callable[[str], Metrics]) -> None:
    count_as("engine-0").count_image("cats")
    found = families(count_as("worker-0"))
    for name, labels in {**COUNTERS, **GAUGES}.items():
        _, samples = found.pop(name.removesuffix("_total"))
        assert samples == {name: labels}
    for name, labels in HISTOGRAMS.items():
        _, samples = found.pop(name)
        assert samples == {f"{name}_bucket": {*labels, "le"}, f"{name}_sum": labels, f"{name}_count": labels}
    assert found == {}
