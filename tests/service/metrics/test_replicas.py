from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from service.metrics.metrics import Metrics
from service.metrics.replicas import merge


def text(endpoint: str, seconds: float) -> str:
    metrics = Metrics()
    metrics.requests.labels(endpoint, "200").inc()
    metrics.request_duration.labels(endpoint).observe(seconds)
    return metrics.render().decode()


def test_each_sample_keeps_its_value_and_gets_the_label_of_its_replica():
    families = list(
        text_string_to_metric_families(merge({"a": text("/classify", 0.5), "b": text("/model", 2)}).decode())
    )

    [requests] = [family for family in families if family.name == "vit_requests"]
    assert [(sample.labels, sample.value) for sample in requests.samples] == [
        ({"endpoint": "/classify", "code": "200", "replica": "a"}, 1),
        ({"endpoint": "/model", "code": "200", "replica": "b"}, 1),
    ]
    assert all("replica" in sample.labels for family in families for sample in family.samples)


def test_each_metric_is_declared_once_with_its_type():
    merged = merge({"a": text("/classify", 0.5), "b": text("/classify", 2)}).decode()
    alone = text("/classify", 0.5)

    declared = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert declared == [line for line in alone.splitlines() if line.startswith("# TYPE")]
    assert 'vit_request_duration_seconds_sum{endpoint="/classify",replica="b"} 2.0' in merged
