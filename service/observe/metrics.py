"""Defines every metric's name, labels and buckets.

Units are base units (seconds, bytes, ratios), and there are histograms and never summaries, so that dashboards
can aggregate over replicas. Each service has a registry of its own: two apps in one process do not mix.

With several processes each counts into files of its own in one private folder, and the worker that is scraped adds
them up (`prometheus_client.multiprocess`) and adds what is read instead of counted: engines, model, pictures, GPUs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model.outputs import Outputs
from service.engine.messages import BatchReport, EngineStatus, ModelInfo
from service.observe.gpus import GpuCollector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

stage_recorder: ContextVar[Callable[[str, float, int | None], None] | None] = ContextVar("stage_recorder", default=None)
"""Adds a stage, its seconds and the size of its batch to the span of the current request; None without a span."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SCORES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)

_HEAD_BYTES = 8
"""Bytes of a file's head, in which `prometheus_client` writes how much of it is used; zeros in an empty file."""


def files_of(process: str) -> dict[str, int]:
    """Return the names of the files that a process counts in, each with more bytes than all its series need."""
    sizes = {"counter": 128 << 10, "histogram": 256 << 10, "gauge_livesum": 4 << 10, "gauge_mostrecent": 4 << 10}
    return {f"{kind}_{process}.db": size for kind, size in sizes.items()}


def count_in_files(folder: Path, process: str) -> None:
    """Make this process count into files of its own that others can read; call it before `Metrics`.

    Args:
        folder: the same for all processes of the service.
        process: unique among those that run. A process that takes over a name goes on counting where its predecessor
            stopped, so that no sum ever falls; what is being handled (`vit_inflight_requests`) begins at zero.
    """
    for gauge in folder.glob(f"gauge_*_{process}.db"):
        with gauge.open("r+b") as file:  # others may have it open, and its memory is taken already
            file.write(bytes(_HEAD_BYTES))
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: process)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Sources:
    """What is read of a service at every scrape.

    Attributes:
        statuses: returns those of the engines.
        recent: returns how many pictures and bytes are kept, and how many pictures were pushed out.
        places: returns how many places for images are taken, and how many there are.
        reloads: returns how many checkpoints took over and were refused, and whether the last one serves.
    """

    statuses: Callable[[], Sequence[EngineStatus]] = tuple
    recent: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    places: Callable[[], tuple[int, int]] = lambda: (0, 0)
    reloads: Callable[[], tuple[int, int, bool]] = lambda: (0, 0, True)


class Metrics(Collector):
    """The service's metrics; with several processes they count in `folder`, see `count_in_files`."""

    def __init__(self, folder: Path | None = None) -> None:
        # The moment at which each series began would be a second series beside it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._folder = folder
        self._state = _StateCollector()
        self._gpus = GpuCollector()
        self.registry.register(self._state)
        self.registry.register(self._gpus)
        registry = None if folder else self.registry
        if registry:  # of one process among several they would say nothing about the service
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            GCCollector(registry=registry)
            self._state.counts_tasks = True
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        gauge = partial(Gauge, registry=registry, multiprocess_mode="livesum")
        self.requests = counter("vit_requests_total", "Requests answered", ["endpoint", "code"])
        self.request_duration = histogram(
            "vit_request_duration_seconds",
            "From a request's head to the end of its answer",
            ["endpoint"],
            buckets=_SECONDS,
        )
        self.stage_duration = histogram(
            "vit_stage_duration_seconds",
            "Time of one image in each stage: read, decode, queue, inference",
            ["stage"],
            buckets=_SECONDS,
        )
        # Looked up once: `labels` takes a lock and hashes strings, four times for each image.
        self.stages = {stage: self.stage_duration.labels(stage) for stage in ("read", "decode", "queue", "inference")}
        self.decoder_restarts = counter(
            "vit_decoder_restarts_total", "Decoder processes that died, or were killed, at a picture"
        )
        self.images = counter("vit_images_total", "Images classified")
        self.batches = counter("vit_batches_total", "Batches launched, by why", ["device", "release"])
        self.batch_size = histogram(
            "vit_batch_size", "Images in a batch, without padding", ["device"], buckets=_BATCH_SIZES
        )
        self.batch_padding = counter("vit_batch_padding_total", "Rows launched beside images", ["device"])
        self.inflight = gauge("vit_inflight_requests", "Requests being handled")
        self.key_requests = counter("vit_key_requests_total", "Requests answered, by API key", ["key", "code"])
        self.key_inflight = gauge("vit_key_inflight_requests", "Requests being handled, by API key", ["key"])
        self.rejected = counter("vit_rejected_total", "Images and requests refused, by problem code", ["reason"])
        self.cancelled = counter("vit_cancelled_total", "Requests whose caller went away before the answer")
        self.recent_errors = counter(
            "vit_recent_errors_total", "Pictures that could not be kept, or looked for, where VIT_RECENT_URL says"
        )
        self.top1_score = histogram("vit_top1_score", "Score of the first class of each answer", buckets=_SCORES)
        self.abstained = counter(
            "vit_abstained_total", "Pictures for which no label fits, of a model with a VIT_COVERAGE"
        )

    def observe_stage(self, stage: str, seconds: float, batch_size: int | None = None) -> None:
        """Measure a stage of one image, or of one body, that has just ended, and add it to the request's span."""
        self.stages[stage].observe(seconds)
        record = stage_recorder.get()
        if record is not None:
            record(stage, seconds, batch_size)

    def observe_classes(self, outputs: Outputs) -> None:
        """Count what the answer of a picture says of its classes."""
        self.top1_score.observe(float(outputs.scores[0]))
        self.count_abstained(outputs)

    def count_abstained(self, outputs: Outputs) -> None:
        """Count a picture whose set of labels is empty."""
        if outputs.label_set is not None and not len(outputs.label_set):
            self.abstained.inc()

    def watch(self, sources: Sources) -> None:
        """Read the state of the service at every scrape instead of following each change."""
        self._state.sources = sources

    def set_model(self, info: ModelInfo, version: str) -> None:
        """Show the served model and its device."""
        self._state.models[info.device] = (info.name, info.architecture, info.device, info.dtype, version, info.source)
        self._gpus.watch(info.device, info.gpu_uuid)

    def observe_batch(self, report: BatchReport) -> None:
        """Count one launch."""
        self.batches.labels(report.device, report.release).inc()
        self.batch_size.labels(report.device).observe(report.size)
        self.batch_padding.labels(report.device).inc(report.padding)

    async def gather(self) -> bytes:
        """Return the answer of `GET /metrics`; a subclass may ask other replicas for theirs."""
        return self.render()

    def render(self) -> bytes:
        """Return all metrics of the service in Prometheus' text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all processes."""
        if self._folder is not None:
            counted = CollectorRegistry()
            MultiProcessCollector(counted, str(self._folder))  # type: ignore[no-untyped-call]
            yield from counted.collect()
        yield from self.registry.collect()


class _StateCollector(Collector):
    """The gauges of the engines, which know their device (`cuda:0`, not `auto`) when ready, and of kept pictures."""

    def __init__(self) -> None:
        self.sources: Sources | None = None
        self.counts_tasks = False
        self.models: dict[str, tuple[str, ...]] = {}

    def collect(self) -> Iterator[Metric]:
        """Return all gauges; each source is read once."""
        model = GaugeMetricFamily(
            "vit_model_info",
            "Always 1; the labels tell what is served",
            labels=["model", "architecture", "device", "dtype", "version", "checkpoint"],
        )
        for labels in self.models.values():
            model.add_metric(labels, 1)
        yield model
        if self.counts_tasks:
            tasks = _tasks()
            yield GaugeMetricFamily("vit_event_loop_tasks", "Tasks of the event loop that is scraped", value=tasks)
        if self.sources is None:
            return
        up = GaugeMetricFamily("vit_engine_up", "1 when the engine answers", labels=["device"])
        depth = GaugeMetricFamily("vit_queue_depth", "Images waiting for a batch", labels=["device"])
        restarts = CounterMetricFamily(
            "vit_engine_restarts_total", "Engines started again after a failure", labels=["device"]
        )
        for status in self.sources.statuses():
            up.add_metric([status.device], float(status.state == "ready"))
            depth.add_metric([status.device], float(status.queue_depth))
            restarts.add_metric([status.device], float(status.restarts))
        yield from (up, depth, restarts)
        pictures, size, evicted = self.sources.recent()
        yield GaugeMetricFamily("vit_recent_images", "Pictures kept for GET /attention", value=pictures)
        yield GaugeMetricFamily("vit_recent_bytes", "Memory of the kept pictures", value=size)
        text = "Pictures pushed out before their time was over"
        yield CounterMetricFamily("vit_recent_evicted_total", text, value=evicted)
        served, refused, successful = self.sources.reloads()
        counts = CounterMetricFamily("vit_reloads_total", "Checkpoints that were to be swapped", labels=["outcome"])
        counts.add_metric(["served"], served)
        counts.add_metric(["refused"], refused)
        yield counts
        text = "0 when the last checkpoint that was to take over was refused, else 1"
        yield GaugeMetricFamily("vit_last_reload_successful", text, value=float(successful))
        taken, limit = self.sources.places()
        yield GaugeMetricFamily("vit_admitted_images", "Images in the service, of all stages", value=taken)
        yield GaugeMetricFamily("vit_admitted_images_limit", "Images that the service admits at once", value=limit)


class _Replicas(Collector):
    """The samples of all replicas, in one family a metric: a name may be declared only once in an answer."""

    def __init__(self, replicas: Mapping[str, Iterable[Metric]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Return all families, the samples of which carry the label `replica`."""
        families: dict[str, Metric] = {}
        for replica, metrics in self._replicas.items():
            for family in metrics:
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica}) for sample in family.samples
                ]
        yield from families.values()


def render_replicas(replicas: Mapping[str, Iterable[Metric]]) -> bytes:
    """Return the metrics of several replicas, by name what `Metrics.collect` returned there, as Prometheus' text."""
    return generate_latest(_Replicas(replicas))


def _tasks() -> int:
    """Return how many tasks the event loop of this thread has."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # no loop runs
        return 0
