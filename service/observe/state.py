"""Metrics that are read at every scrape: models, engines, kept pictures, slots, GPUs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from service.engine.messages import EngineStatus
from service.observe.gpus import GAUGES, GpuReader
from vitserve.documents import ListedModel

MODEL_STATES = ("ready", "loading", "unloaded", "failed")

_MODEL_LABELS = ["model", "architecture", "device", "dtype", "version", "checkpoint", "content"]

_Row = tuple[str, str, list[str], Mapping[tuple[str, ...], float]]
"""Name of a metric, help text, names of its labels, and values by label values."""


@dataclass(frozen=True)
class Sources:
    """Functions and values that describe the state of a service at a scrape.

    Attributes:
        statuses: returns the statuses of the engines.
        recent: returns the number of kept pictures, their bytes, and the number of evictions.
        slots: returns the number of images that take a slot, and the number of slots.
        models: returns the models and heads, whose series stay while others end; None keeps all
            series.
        results: returns counts of loads and swaps by result.
        reloads: returns whether the last swap of each model succeeded, by its name.
        recent_ttl: seconds for which a picture is kept.
    """

    statuses: Callable[[], Sequence[EngineStatus]] = tuple
    recent: Callable[[], tuple[int, int, int]] = lambda: (0, 0, 0)
    slots: Callable[[], tuple[int, int]] = lambda: (0, 0)
    models: Callable[[], Sequence[ListedModel] | None] = lambda: None
    results: Callable[[], Mapping[str, int]] = dict
    reloads: Callable[[], Mapping[str, bool]] = dict
    recent_ttl: float = 0.0


class StateCollector(Collector):
    """Collects the metrics of `Sources`.

    Attributes:
        models: time at which each model was loaded, by the values of its labels.
    """

    def __init__(self) -> None:
        self.sources = Sources()
        self.models: dict[tuple[str, ...], float] = {}
        self.gpus = GpuReader()

    def collect(self) -> Iterator[Metric]:
        """Yield all families; each source is read once."""
        statuses = self.sources.statuses()
        results = self.sources.results()
        pictures, picture_bytes, evicted = self.sources.recent()
        gauges: list[_Row] = [
            *self._model_gauges(),
            *_engine_gauges(statuses),
            ("vit_recent_images", "Pictures kept for GET /attention", [], {(): pictures}),
            ("vit_recent_bytes", "Memory of the kept pictures", [], {(): picture_bytes}),
            (
                "vit_recent_ttl_seconds",
                "Time for which a picture is kept",
                [],
                {(): self.sources.recent_ttl},
            ),
            *(
                (name, GAUGES[name], ["gpu"], samples)
                for name, samples in self.gpus.samples().items()
            ),
        ]
        counters: list[_Row] = [
            (
                "vit_engine_restarts_total",
                "Restarts of an engine after a failure",
                ["device"],
                {(status.device,): status.restarts for status in reversed(statuses)},
            ),
            ("vit_recent_evicted_total", "Early evictions of kept pictures", [], {(): evicted}),
            (
                "vit_reloads_total",
                "Reloads of a checkpoint, by outcome",
                ["outcome"],
                {(name,): results.get(name, 0) for name in ("served", "refused")},
            ),
            (
                "vit_model_loads_total",
                "Loads of models, by result",
                ["result"],
                {(name,): results.get(name, 0) for name in ("loaded", "failed")},
            ),
            (
                "vit_model_evictions_total",
                "Backbones unloaded to free memory for others",
                [],
                {(): results.get("evicted", 0)},
            ),
        ]
        for kind, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, labels, samples in rows:
                family = kind(name, text, labels=labels)
                for label_values, value in samples.items():
                    family.add_metric(label_values, value)
                yield family

    def _model_gauges(self) -> list[_Row]:
        listed = self.sources.models() or ()
        by_age = sorted(self.models.items(), key=lambda item: item[1])
        device = _MODEL_LABELS.index("device")
        return [
            (
                "vit_model_info",
                "Always 1; the labels describe a served model",
                _MODEL_LABELS,
                dict.fromkeys(self.models, 1.0),
            ),
            (
                "vit_model_loaded_timestamp_seconds",
                "Time at which the newest model was loaded",
                ["device"],
                {(labels[device],): loaded_at for labels, loaded_at in by_age},
            ),
            (
                "vit_last_reload_successful",
                "0 if the last reload of this model was refused, else 1",
                ["model"],
                {(model,): float(succeeded) for model, succeeded in self.sources.reloads().items()},
            ),
            (
                "vit_backbone_bytes",
                "Measured memory of each loaded backbone",
                ["backbone"],
                {
                    (model.backbone,): model.bytes
                    for model in listed
                    if model.state == "ready" and model.backbone and not model.taught
                },
            ),
            (
                "vit_model_state",
                "1 for the current state of a model, 0 for the others",
                ["model", "state"],
                {
                    (model.name, state): float(state == model.state)
                    for model in listed
                    for state in MODEL_STATES
                },
            ),
        ]


def _engine_gauges(statuses: Sequence[EngineStatus]) -> list[_Row]:
    up: dict[tuple[str, ...], float] = {}
    depths: dict[tuple[str, ...], float] = {}
    for status in reversed(statuses):  # of several engines on a device, the first one's state
        device = (status.device,)
        up[device] = float(status.state == "ready")
        depths[device] = depths.get(device, 0) + status.queue_depth
    return [
        ("vit_engine_up", "1 while the engine answers", ["device"], up),
        ("vit_queue_depth", "Images waiting for a batch", ["device"], depths),
    ]
