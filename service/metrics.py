"""Every metric's name, labels and buckets, in one place.

Base units (seconds, bytes, ratios); histograms and never summaries, so that dashboards can aggregate
over replicas. Each service has a registry of its own: two apps in one process do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from service.gpu_metrics import watch_gpu
from service.messages import BatchReport, EngineStatus, ModelInfo

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SCORE = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


class Metrics:
    """The service's metrics; `render` is what Prometheus scrapes."""

    def __init__(self) -> None:
        # The moment each series began would be a second series beside every one.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self.registry = CollectorRegistry()
        self._watches_gpu = False
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self.requests = Counter("vit_requests_total", "Requests answered", ["endpoint", "code"], registry=registry)
        self.request_duration = Histogram(
            "vit_request_duration_seconds",
            "From a request's head to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.stage_duration = Histogram(
            "vit_stage_duration_seconds",
            "Time of one image in each stage: read, decode, queue, inference",
            ["stage"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.images = Counter("vit_images_total", "Images classified", registry=registry)
        self.batches = Counter(
            "vit_batches_total", "Batches launched, by why", ["device", "release"], registry=registry
        )
        self.batch_size = Histogram(
            "vit_batch_size", "Images in a batch, without padding", ["device"], buckets=_BATCH, registry=registry
        )
        self.batch_padding = Counter(
            "vit_batch_padding_total", "Rows launched beside images", ["device"], registry=registry
        )
        self.inflight = Gauge("vit_inflight_requests", "Requests being handled", registry=registry)
        self.rejected = Counter(
            "vit_rejected_total", "Images and requests refused, by problem code", ["reason"], registry=registry
        )
        self.cancelled = Counter(
            "vit_cancelled_total", "Requests whose caller went away before the answer", registry=registry
        )
        self.top1_score = Histogram(
            "vit_top1_score", "Score of the first class of each answer", buckets=_SCORE, registry=registry
        )
        self.engine_restarts = Counter(
            "vit_engine_restarts_total", "Engines started again after a failure", ["device"], registry=registry
        )
        self.model_info = Gauge(
            "vit_model_info",
            "Always 1; the labels tell what is served",
            ["model", "architecture", "device", "dtype", "version"],
            registry=registry,
        )
        self.recent_images = Gauge("vit_recent_images", "Pictures kept for GET /attention", registry=registry)
        self.recent_bytes = Gauge("vit_recent_bytes", "Memory of the kept pictures", registry=registry)

    def watch_engine(self, status: Callable[[], EngineStatus]) -> None:
        """Read the engine's state at every scrape instead of being told of each change."""
        self.registry.register(_EngineCollector(status))

    def set_model(self, info: ModelInfo, version: str) -> None:
        """Tell what is served."""
        self.model_info.clear()
        self.model_info.labels(info.name, info.architecture, info.device, info.dtype, version).set(1)
        self._watches_gpu = self._watches_gpu or watch_gpu(self.registry, info.device, info.gpu_uuid)
        # So that rates start from zero and not from nothing.
        self.engine_restarts.labels(info.device)

    def observe_batch(self, report: BatchReport) -> None:
        """Count one launch."""
        self.batches.labels(report.device, report.release).inc()
        self.batch_size.labels(report.device).observe(report.size)
        self.batch_padding.labels(report.device).inc(report.padding)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's gauges; its device is known for sure (`cuda:0`, not `auto`) only when it is ready."""

    def __init__(self, status: Callable[[], EngineStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Both gauges, from one look at the engine."""
        status = self._status()
        up = GaugeMetricFamily("vit_engine_up", "1 when the engine answers", labels=["device"])
        up.add_metric([status.device], float(status.state == "ready"))
        yield up
        depth = GaugeMetricFamily("vit_queue_depth", "Images waiting for a batch", labels=["device"])
        depth.add_metric([status.device], float(status.queue_depth))
        yield depth
