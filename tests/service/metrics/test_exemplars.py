"""Exemplars: each in its bucket, in a format that parsers take, counted by one process or by several."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import Metric, values
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from service.metrics.metrics import Exemplars, Metrics, count_in_files

LABELS = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}


@pytest.fixture(params=["one process", "several"])
def metrics(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Metrics:
    if request.param == "one process":
        return Metrics()
    monkeypatch.setattr(values, "ValueClass", values.ValueClass)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")
    count_in_files(tmp_path, "worker-0")
    return Metrics(tmp_path)


def families(metrics: Metrics) -> dict[str, Metric]:
    """What a parser of OpenMetrics reads; it raises where the text is not."""
    text = metrics.render_openmetrics().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_bucket_shows_the_newest_request_that_fell_into_it(metrics: Metrics) -> None:
    for seconds, span_id in ((0.003, "a"), (0.004, "b"), (0.3, "c"), (100.0, "d")):
        metrics.request_duration.labels("/classify").observe(seconds)
        metrics.exemplars.remember("/classify", seconds, LABELS | {"span_id": span_id})
    metrics.request_duration.labels("/model").observe(0.003)
    samples = families(metrics)["vit_request_duration_seconds"].samples
    found = {
        sample.labels["le"]: (sample.exemplar.labels["span_id"], sample.exemplar.value)
        for sample in samples
        if sample.exemplar is not None
    }
    assert found == {"0.005": ("b", 0.004), "0.5": ("c", 0.3), "+Inf": ("d", 100.0)}
    assert b"trace_id" not in metrics.render()


def test_both_formats_have_the_same_samples(metrics: Metrics) -> None:
    metrics.requests.labels("/classify", "200").inc()
    metrics.request_duration.labels("/classify").observe(0.1)
    metrics.inflight.inc()
    samples = {
        line.rpartition(" ")[0]
        for text in (metrics.render(), metrics.render_openmetrics())
        for line in text.decode().splitlines()
        if line.startswith("vit_")
    }
    for text in (metrics.render(), metrics.render_openmetrics()):
        assert samples == {line.rpartition(" ")[0] for line in text.decode().splitlines() if line.startswith("vit_")}
    assert families(metrics)


def test_a_value_on_a_bound_belongs_to_the_bucket_below_as_in_the_histogram() -> None:
    exemplars = Exemplars("h", (0.1, 1.0), wall_clock=lambda: 7.0)
    exemplars.remember("/", 0.1, LABELS)
    metric = Metric("h", "", "histogram")
    for bound in ("0.1", "1.0", "+Inf"):
        metric.add_sample("h_bucket", {"endpoint": "/", "le": bound}, 1.0)
    metric.add_sample("h_count", {"endpoint": "/"}, 1.0)
    first, *others = exemplars.add_to(metric).samples
    assert first.exemplar is not None
    assert (first.exemplar.labels, first.exemplar.value, first.exemplar.timestamp) == (LABELS, 0.1, 7.0)
    assert [sample.exemplar for sample in others] == [None] * 3
