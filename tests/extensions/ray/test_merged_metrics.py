"""Metrics of several replicas in one answer."""

import pickle

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.extensions.ray.merged_metrics import MergedMetrics
from service.observe.metrics import Metrics


def replica(endpoint: str, seconds: float) -> Metrics:
    metrics = Metrics()
    metrics.requests.labels(endpoint, "200").inc()
    metrics.request_duration.labels(endpoint).observe(seconds)
    return metrics


def merge(**replicas: Metrics) -> str:
    """Render metrics that arrived from other processes."""
    sent = {name: pickle.dumps(list(metrics.collect())) for name, metrics in replicas.items()}
    received = {name: pickle.loads(data) for name, data in sent.items()}
    return generate_latest(MergedMetrics(received)).decode()


def test_samples_of_replicas_keep_values():
    merged = merge(a=replica("/classify", 0.5), b=replica("/model", 2))
    families = list(text_string_to_metric_families(merged))

    [requests] = [family for family in families if family.name == "vit_requests"]
    assert [(sample.labels, sample.value) for sample in requests.samples] == [
        ({"endpoint": "/classify", "code": "200", "replica": "a"}, 1),
        ({"endpoint": "/model", "code": "200", "replica": "b"}, 1),
    ]
    assert all("replica" in sample.labels for family in families for sample in family.samples)
