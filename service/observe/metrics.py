"""Defines every metric's name, labels and buckets.

Units are base units (seconds, bytes, ratios), and there are histograms and never summaries, so that
dashboards can aggregate over replicas. Each service has a registry of its own: two apps in one
process do not mix.

With several processes each counts into files of its own in one private folder, and the worker that
is scraped adds them up (`prometheus_client.multiprocess`) and adds what is read instead of counted:
engines, model, pictures, GPUs.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.gc_collector import GCCollector
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from model.outputs import Outputs
from service import background
from service.engine.messages import BatchReport, EngineStatus, ModelInfo, Release
from service.observe import logs
from service.observe.gpus import GAUGES, GpuReader

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

stage_recorder: ContextVar[Callable[[str, float, int | None], None] | None] = ContextVar(
    "stage_recorder", default=None
)
"""Adds a stage, its seconds and the size of its batch to the span of the current request; None
without a span.
"""

stage_seconds: ContextVar[dict[str, float] | None] = ContextVar("stage_seconds", default=None)
"""Seconds of each stage of the current request, summed over its images, for its line in the log."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_AGES = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 86_400)
_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_SCORES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1)


MODEL_STATES = ("ready", "loading", "unloaded", "failed")

_OF_MODELS = frozenset({"vit_images", "vit_top1_score", "vit_image_duration_seconds"})
"""Families whose samples have the name of a model."""

_MODEL = ["model", "architecture", "device", "dtype", "version", "checkpoint", "content"]

_Row = tuple[str, str, list[str], Mapping[tuple[str, ...], float]]
"""Name of a metric, description, names of labels, and values by these labels' values."""


@dataclass(frozen=True)
class Sources:
    """What is read of a service at every scrape.

    Attributes:
        statuses: returns those of the engines.
        recent: returns how many pictures and bytes are kept, and how many pictures were pushed out.
        places: returns how many places for images are taken, and how many there are.
        names: returns those of all models, None if it does not matter; series of other ones have
        ended.
        results: see `service.models.registry.Models`.
        backbones: returns the bytes of each that is loaded.
        states: returns the state of each model, by its name.
        reloads: returns whether the last swap of each model succeeded, by its name.
        recent_ttl: seconds that a picture is kept.
    """

    statuses: Callable[[], Sequence[EngineStatus]] = tuple
    recent: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    places: Callable[[], tuple[int, int]] = lambda: (0, 0)
    names: Callable[[], Container[str] | None] = lambda: None
    results: Callable[[], Mapping[str, int]] = dict
    backbones: Callable[[], Mapping[str, int]] = dict
    states: Callable[[], Mapping[str, str]] = dict
    reloads: Callable[[], Mapping[str, bool]] = dict
    recent_ttl: float = 0.0


class Metrics(Collector):
    """The service's metrics; with several processes they count in files in `folder`
    (`service.extensions.cluster.run`).
    """

    def __init__(self, folder: Path | None = None) -> None:
        # The moment at which each series began would be a second series beside it.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._folder = folder
        self._state = _StateCollector()
        self.registry.register(self._state)
        registry = None if folder else self.registry
        if registry:  # of one process among several they would say nothing about the service
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
            GCCollector(registry=registry)
        counter, histogram = (
            partial(Counter, registry=registry),
            partial(Histogram, registry=registry),
        )
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
        self.stages = {
            stage: self.stage_duration.labels(stage)
            for stage in ("read", "decode", "queue", "inference")
        }
        self.decoder_restarts = counter(
            "vit_decoder_restarts_total",
            "Decoder processes that died, or were killed, at a picture",
        )
        self.log_lines_dropped = counter(
            "vit_log_lines_dropped_total", "Log lines dropped because nothing read the log"
        )
        self.task_restarts = counter(
            "vit_task_restarts_total",
            "Background tasks that failed and were started again",
            ["task"],
        )
        self._images = counter("vit_images_total", "Images classified", ["model"])
        self.batches = counter(
            "vit_batches_total", "Batches launched, by why", ["device", "release"]
        )
        self.batch_size = histogram(
            "vit_batch_size", "Images in a batch, without padding", ["device"], buckets=_BATCH_SIZES
        )
        self.batch_padding = counter(
            "vit_batch_padding_total", "Rows launched beside images", ["device"]
        )
        self._batches = lru_cache(maxsize=64)(
            lambda device, release: (
                self.batches.labels(device, release),
                self.batch_size.labels(device),
                self.batch_padding.labels(device),
            )
        )
        self.inflight = gauge("vit_inflight_requests", "Requests being handled")
        self.admitted = gauge("vit_admitted_images", "Images in the service, of all stages")
        self.admitted_limit = gauge(
            "vit_admitted_images_limit", "Images that the service admits at once"
        )
        self.key_requests = counter(
            "vit_key_requests_total", "Requests answered, by API key", ["key", "code"]
        )
        self.key_inflight = gauge(
            "vit_key_inflight_requests", "Requests being handled, by API key", ["key"]
        )
        self.rejected = counter(
            "vit_rejected_total", "Images and requests refused, by problem code", ["reason"]
        )
        self.cancelled = counter(
            "vit_cancelled_total", "Requests whose caller went away before the answer"
        )
        self.recent_errors = counter(
            "vit_recent_errors_total",
            "Pictures that could not be kept, or looked for, where VIT_RECENT_URL says",
        )
        self._top1_score = histogram(
            "vit_top1_score", "Score of the first class of each answer", ["model"], buckets=_SCORES
        )
        self._image_duration = histogram(
            "vit_image_duration_seconds",
            "From a request's head to the answer for each image, without maps of /attention",
            ["model"],
            buckets=_SECONDS,
        )
        self.recent_evicted_age = histogram(
            "vit_recent_evicted_age_seconds",
            "Age of pictures that were pushed out before their time",
            buckets=_AGES,
        )
        # A child is looked up under a lock.
        self._of_model = lru_cache(maxsize=256)(
            lambda name: (
                self._images.labels(name),
                self._top1_score.labels(name),
                self._image_duration.labels(name),
            )
        )
        self.abstained = counter(
            "vit_abstained_total",
            "Pictures for which no label fits, of a model with a VIT_COVERAGE, or of a taught head",
        )

    def observe_stage(self, stage: str, seconds: float, batch_size: int | None = None) -> None:
        """Measure a stage of one image, or of one body, that has just ended, for the request's span
        and log, too.
        """
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
            outputs: the answer, if it is of the model's classes.
            seconds: time from the request's head to the answer; None if it is not measured, as for
            maps.
        """
        images, top1_score, duration = self._of_model(model)
        images.inc()
        if seconds is not None:
            duration.observe(seconds)
        if outputs is not None:
            top1_score.observe(float(outputs.scores[0]))
            if outputs.abstains:
                self.abstained.inc()

    def watch(self, sources: Sources) -> None:
        """Read the state of the service at every scrape instead of following each change."""
        self._state.sources = sources

    def set_models(self, infos: Iterable[ModelInfo], version: str) -> None:
        """Show the models that are served, and their devices; series of others end."""
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
            self._of_model(info.name)
            self._state.gpus.watch(info.device, info.gpu_uuid)
        self._state.models = models

    def observe_batch(self, report: BatchReport) -> None:
        """Count one launch."""
        batches, size, padding = self._batches(report.device, report.release)
        batches.inc()
        size.observe(report.size)
        padding.inc(report.padding)

    def observe_process(self) -> None:
        """Count the log lines that this process drops from now on, and the background tasks that it
        starts again.
        """
        logs.on_drop(self.log_lines_dropped.inc)
        background.on_restart(lambda task: self.task_restarts.labels(task).inc())

    async def gather(self) -> bytes:
        """Return all metrics of the service in Prometheus' text format; a subclass may ask other
        replicas.
        """
        return generate_latest(self)

    def publish(self) -> None:
        """Let the scrapes of other processes see what this one reads at its own."""
        taken, limit = self._state.sources.places()
        self.admitted.set(taken)
        self.admitted_limit.set(limit)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all processes."""
        self.publish()
        counted = CollectorRegistry()
        if self._folder is not None:
            MultiProcessCollector(counted, str(self._folder))  # type: ignore[no-untyped-call]
        names = self._state.sources.names()
        for family in (*counted.collect(), *self.registry.collect()):
            if family.name in _OF_MODELS and names is not None:
                family.samples = [
                    sample for sample in family.samples if sample.labels["model"] in names
                ]
            yield family


class _StateCollector(Collector):
    """The metrics of what is read at every scrape: models, engines, kept pictures, places, GPUs."""

    def __init__(self) -> None:
        self.sources = Sources()
        self.models: dict[tuple[str, ...], float] = {}  # by their labels, when they were loaded
        self.gpus = GpuReader()

    def collect(self) -> Iterator[Metric]:
        """Return all families; each source is read once."""
        statuses = self.sources.statuses()
        engines: dict[tuple[str, ...], EngineStatus] = {
            (status.device,): status for status in reversed(statuses)
        }
        pictures, size, evicted = self.sources.recent()
        results = self.sources.results()
        gauges: list[_Row] = [
            (
                "vit_model_info",
                "Always 1; the labels tell what is served",
                _MODEL,
                dict.fromkeys(self.models, 1.0),
            ),
            (
                "vit_model_loaded_timestamp_seconds",
                "When the model was loaded",
                ["device"],
                {
                    (labels[2],): at
                    for labels, at in sorted(self.models.items(), key=lambda item: item[1])
                },
            ),
            (
                "vit_engine_up",
                "1 when the engine answers",
                ["device"],
                {device: float(status.state == "ready") for device, status in engines.items()},
            ),
            (
                "vit_queue_depth",
                "Images waiting for a batch",
                ["device"],
                {
                    (on,): sum(each.queue_depth for each in statuses if each.device == on)
                    for (on,) in engines
                },
            ),
            ("vit_recent_images", "Pictures kept for GET /attention", [], {(): pictures}),
            ("vit_recent_bytes", "Memory of the kept pictures", [], {(): size}),
            (
                "vit_recent_ttl_seconds",
                "Seconds that a picture is kept",
                [],
                {(): self.sources.recent_ttl},
            ),
            (
                "vit_last_reload_successful",
                "0 when the last checkpoint that was to take over from the model's was refused, else 1",
                ["model"],
                {(model,): float(succeeded) for model, succeeded in self.sources.reloads().items()},
            ),
            (
                "vit_backbone_bytes",
                "Measured memory of each backbone that is loaded",
                ["backbone"],
                {(name,): size for name, size in self.sources.backbones().items()},
            ),
            (
                "vit_model_state",
                "1 for the state that a model has, 0 for the others",
                ["model", "state"],
                {
                    (model, state): float(state == present)
                    for model, present in self.sources.states().items()
                    for state in MODEL_STATES
                },
            ),
            *(
                (name, GAUGES[name], ["gpu"], samples)
                for name, samples in self.gpus.samples().items()
            ),
        ]
        counters: list[_Row] = [
            (
                "vit_engine_restarts_total",
                "Engines started again after a failure",
                ["device"],
                {device: status.restarts for device, status in engines.items()},
            ),
            (
                "vit_recent_evicted_total",
                "Pictures pushed out before their time was over",
                [],
                {(): evicted},
            ),
            (
                "vit_reloads_total",
                "Checkpoints that were to be swapped",
                ["outcome"],
                {(name,): results.get(name, 0) for name in ("served", "refused")},
            ),
            (
                "vit_model_loads_total",
                "Models that were to be loaded, by how it ended",
                ["result"],
                {(name,): results.get(name, 0) for name in ("loaded", "failed")},
            ),
            (
                "vit_model_evictions_total",
                "Backbones unloaded for others",
                [],
                {(): results.get("evicted", 0)},
            ),
        ]
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, labels, samples in rows:
                family = kind(name, text, labels=labels)
                for values_of_labels, value in samples.items():
                    family.add_metric(values_of_labels, value)
                yield family


class _Replicas(Collector):
    """The samples of all replicas, in one family a metric: a name may be declared only once in an
    answer.
    """

    def __init__(self, replicas: Mapping[str, Iterable[Metric]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        """Return all families, the samples of which carry the label `replica`."""
        families: dict[str, Metric] = {}
        for replica, metrics in self._replicas.items():
            for family in metrics:
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, "replica": replica})
                    for sample in family.samples
                ]
        yield from families.values()


def render_replicas(replicas: Mapping[str, Iterable[Metric]]) -> bytes:
    """Return the metrics of several replicas, by name what `Metrics.collect` returned there, as
    Prometheus' text.
    """
    return generate_latest(_Replicas(replicas))
