"""Defines every metric's name, labels and buckets.

Units are base units (seconds, bytes, ratios). Distributions are histograms, never summaries, so
that dashboards can aggregate over replicas. Each service has its own registry: two apps in one
process do not mix.

With several processes, each process counts in its own files in one private folder. The scraped
process adds them up (`prometheus_client.multiprocess`), and adds the metrics of `state`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.gc_collector import GCCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model.outputs import Outputs
from service import background
from service.engine.messages import BatchReport, ModelInfo, Release
from service.observe import logs
from service.observe.scrapes import Scrapes
from service.observe.state import Sources, StateCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

stage_recorder: ContextVar[Callable[[str, float, int | None], None] | None] = ContextVar(
    "stage_recorder", default=None
)
"""Adds a stage, its seconds and its batch size to the current request's span; None without one."""

stage_seconds: ContextVar[dict[str, float] | None] = ContextVar("stage_seconds", default=None)
"""Seconds of each stage of the current request, summed over its images, for its log line."""

_STAGES = ("read", "decode", "queue", "inference")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_AGES = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 86_400)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SCORES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

_BY_MODEL = frozenset({"vit_images", "vit_top1_score", "vit_image_duration_seconds"})
"""Metrics whose series disappear when the model is removed."""


class Metrics(Collector):
    """The metrics of a service.

    `counter`, `gauge` and `histogram` add further metrics, for extensions.

    Attributes:
        scrapes: the texts of scrapes.

    Args:
        folder: folder in which several processes count; None for a service of one process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        # The creation time of each series would be a second series.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.scrapes = Scrapes(self.gather)
        self.registry = CollectorRegistry()
        self._folder = folder
        self._state = StateCollector()
        self.registry.register(self._state)
        # With a folder, its files are scraped: a metric in `registry` would be a second series. The
        # other registry refuses two metrics of one name.
        self._registry = CollectorRegistry() if folder else self.registry
        if folder is None:  # values of one process among several would not describe the service
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)
            GCCollector(registry=self.registry)
        self.requests = self.counter(
            "vit_requests_total", "Answered requests", ["endpoint", "code"]
        )
        self.request_duration = self.histogram(
            "vit_request_duration_seconds",
            "From a request's headers to the end of its answer",
            ["endpoint"],
        )
        self.stage_duration = self.histogram(
            "vit_stage_duration_seconds",
            "Time of one image in each stage: read, decode, queue, inference",
            ["stage"],
        )
        # `labels` takes a lock and hashes strings: call it once, not four times per image.
        self.stages = {stage: self.stage_duration.labels(stage) for stage in _STAGES}
        self.decoder_restarts = self.counter(
            "vit_decoder_restarts_total", "Decoder processes that died or were killed"
        )
        self.log_lines_dropped = self.counter(
            "vit_log_lines_dropped_total",
            "Log lines dropped because nothing read the log fast enough",
        )
        self.task_restarts = self.counter(
            "vit_task_restarts_total",
            "Background tasks and threads that failed and restarted",
            ["task"],
        )
        self._images = self.counter("vit_images_total", "Classified images", ["model"])
        self.batches = self.counter(
            "vit_batches_total", "Batches, by reason of launch", ["device", "release"]
        )
        self.batch_size = self.histogram(
            "vit_batch_size", "Images in a batch, without padding", ["device"], buckets=_BATCH_SIZES
        )
        self.batch_padding = self.counter(
            "vit_batch_padding_total",
            "Empty rows added to reach a fixed batch size",
            ["device"],
        )
        self._batches = lru_cache(maxsize=64)(
            lambda device, release: (
                self.batches.labels(device, release),
                self.batch_size.labels(device),
                self.batch_padding.labels(device),
            )
        )
        self.inflight = self.gauge("vit_inflight_requests", "Requests in progress")
        self.admitted = self.gauge("vit_admitted_images", "Images in the service, in all stages")
        self.admitted_limit = self.gauge(
            "vit_admitted_images_limit", "Maximum of images in the service at once"
        )
        self.key_requests = self.counter(
            "vit_key_requests_total", "Answered requests, by API key", ["key", "code"]
        )
        self.key_inflight = self.gauge(
            "vit_key_inflight_requests", "Requests in progress, by API key", ["key"]
        )
        self.rejected = self.counter(
            "vit_rejected_total", "Refused images and requests, by problem code", ["reason"]
        )
        self.cancelled = self.counter(
            "vit_cancelled_total", "Requests whose client disconnected before the answer"
        )
        self.recent_errors = self.counter(
            "vit_recent_errors_total",
            "Pictures that the store of VIT_RECENT_URL failed to keep or to return",
        )
        self._top1_score = self.histogram(
            "vit_top1_score", "Highest score of each answer", ["model"], buckets=_SCORES
        )
        self._image_duration = self.histogram(
            "vit_image_duration_seconds",
            "From a request's headers to the answer for each image, without maps of /attention",
            ["model"],
        )
        self.recent_evicted_age = self.histogram(
            "vit_recent_evicted_age_seconds",
            "Age of kept pictures at early evictions",
            buckets=_AGES,
        )
        # `labels` takes a lock.
        self._by_model = lru_cache(maxsize=256)(
            lambda name: (
                self._images.labels(name),
                self._top1_score.labels(name),
                self._image_duration.labels(name),
            )
        )
        self.abstained = self.counter(
            "vit_abstained_total",
            "Pictures without a fitting label, for models and heads that may abstain",
        )

    def counter(self, name: str, summary: str, labels: Sequence[str] = ()) -> Counter:
        """Add a counter, which a scrape sums over all processes."""
        return Counter(name, summary, labels, registry=self._registry)

    def gauge(self, name: str, summary: str, labels: Sequence[str] = ()) -> Gauge:
        """Add a gauge, which a scrape sums over the running processes."""
        return Gauge(name, summary, labels, registry=self._registry, multiprocess_mode="livesum")

    def histogram(
        self,
        name: str,
        summary: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = _SECONDS,
    ) -> Histogram:
        """Add a histogram; its buckets are by default those of durations in seconds."""
        return Histogram(name, summary, labels, registry=self._registry, buckets=buckets)

    def observe_stage(self, stage: str, seconds: float, batch_size: int | None = None) -> None:
        """Measure a completed stage of one image or body, also for the request's span and log."""
        self.stages[stage].observe(seconds)
        times = stage_seconds.get()
        if times is not None:
            times[stage] = times.get(stage, 0.0) + seconds
        record = stage_recorder.get()
        if record is not None:
            record(stage, seconds, batch_size)

    def count_image(
        self, model: str, outputs: Outputs | None = None, seconds: float | None = None
    ) -> None:
        """Count a picture that a model answered.

        Args:
            model: name of the model.
            outputs: the answer, if it is about the model's own classes.
            seconds: time from the request's headers to the answer; None for maps, which are not
                measured.
        """
        images, top1_score, duration = self._by_model(model)
        images.inc()
        if seconds is not None:
            duration.observe(seconds)
        if outputs is not None:
            top1_score.observe(float(outputs.scores[0]))
            if outputs.abstains:
                self.abstained.inc()

    def watch(self, sources: Sources) -> None:
        """Read the state of the service from these sources at every scrape."""
        self._state.sources = sources

    def set_models(self, infos: Iterable[ModelInfo], version: str) -> None:
        """Show the served models and their devices; end the series of other models."""
        models: dict[tuple[str, ...], float] = {}
        for info in infos:
            labels = (
                info.name,
                info.architecture,
                info.device,
                info.dtype,
                version,
                info.source,
                info.content,
            )
            models[labels] = info.loaded_at
            for release in get_args(Release):
                self.batches.labels(info.device, release)
            self.batch_padding.labels(info.device)
            self._by_model(info.name)
            self._state.gpus.watch(info.device, info.gpu_uuid)
        self._state.models = models

    def observe_batch(self, report: BatchReport) -> None:
        """Count one batch."""
        batches, size, padding = self._batches(report.device, report.release)
        batches.inc()
        size.observe(report.size)
        padding.inc(report.padding)

    def observe_process(self) -> None:
        """Count this process's dropped log lines and restarts of background tasks from now on."""

        def count_restart(task: str) -> None:
            self.task_restarts.labels(task).inc()

        logs.on_drop(self.log_lines_dropped.inc)
        background.on_restart(count_restart)

    async def gather(self) -> bytes:
        """Return all metrics in Prometheus' text format; a subclass may ask other replicas."""
        return generate_latest(self)

    def publish(self) -> None:
        """Publish the gauges of this process to scrapes of other processes."""
        taken, slots = self._state.sources.slots()
        self.admitted.set(taken)
        self.admitted_limit.set(slots)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all processes."""
        self.publish()
        counted = CollectorRegistry()
        if self._folder is not None:
            MultiProcessCollector(counted, str(self._folder))  # type: ignore[no-untyped-call]
        models = self._state.sources.models()
        names = None if models is None else {model.name for model in models}
        for family in (*counted.collect(), *self.registry.collect()):
            if family.name in _BY_MODEL and names is not None:
                family.samples = [
                    sample for sample in family.samples if sample.labels["model"] in names
                ]
            yield family
