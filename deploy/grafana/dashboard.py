"""Writes Grafana's dashboard of vitserve: `make dashboard`. It is made from this file, and not written by hand.

Every query takes the data source, the jobs and the instances from the dashboard's variables.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, Panel, VariableRefresh

from deploy.grafana.panels import SOURCE, dial, histogram, lines, name, number, shares

TARGET: Final = Path(__file__).parent / "dashboards" / "vitserve.json"

_OF: Final = 'job=~"$job",instance=~"$instance"'
_TRAFFIC: Final = f'{_OF},endpoint!~"/healthz|/readyz|/metrics"'
_CLASSIFY: Final = f'{_OF},endpoint="/classify"'
_GPU: Final = "{{instance}} {{gpu}}"
_QUANTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


def _all(metric: str, by: str = "") -> str:
    """Return the query of a gauge's sum."""
    return f"sum by ({by}) ({metric}{{{_OF}}})" if by else f"sum({metric}{{{_OF}}})"


def _rate(metric: str, by: str = "", labels: str = _OF) -> str:
    """Return the query of a counter's increase a second."""
    rate = f"(rate({metric}{{{labels}}}[$__rate_interval]))"
    return f"sum by ({by}) {rate}" if by else f"sum{rate}"


def _quantile(quantile: float, metric: str, by: str = "le", labels: str = _OF) -> str:
    """Return the query of a histogram's quantile, over all instances together."""
    return f"histogram_quantile({quantile}, {_rate(f'{metric}_bucket', by, labels)})"


def _now() -> list[Builder[Panel]]:
    failed = _rate("vit_requests_total", labels=f'{_TRAFFIC},code=~"5.."')
    places = f"vit_admitted_images{{{_OF}}} / vit_admitted_images_limit{{{_OF}}}"
    model = f"max by (model, device, dtype, version) (vit_model_info{{{_OF}}})"
    return [
        number(
            "Images per second", "none", _rate("vit_images_total"), "Images that were classified.", ((None, "blue"),)
        ),
        number(
            "Failed requests",
            "percentunit",
            f"({failed} or vector(0)) / ({_rate('vit_requests_total', labels=_TRAFFIC)} > 0)",
            "Requests that were answered 5xx. The target of the alerts is 0.1 %.",
            ((None, "green"), (0.001, "orange"), (0.0144, "red")),
        ),
        number(
            "p99 of /classify",
            "s",
            _quantile(0.99, "vit_request_duration_seconds", labels=_CLASSIFY),
            "From a request's head to the end of its answer.",
            ((None, "green"), (0.5, "orange"), (1, "red")),
        ),
        dial(
            "Places taken",
            f"max({places})",
            "Images in the service, of those that it admits at once (VIT_QUEUE_SIZE).",
            ((None, "green"), (0.8, "orange"), (0.95, "red")),
        ),
        number("Engines up", "none", _all("vit_engine_up"), "Engines that answer.", ((None, "red"), (1, "green"))),
        name("Model", model, "{{model}} on {{device}}, {{dtype}}, {{version}}", "What is served, and on which device."),
    ]


def _traffic() -> list[Builder[Panel]]:
    requests = {by: _rate("vit_requests_total", by, _TRAFFIC) for by in ("endpoint", "code")}
    refused = {"{{reason}}": _rate("vit_rejected_total", "reason"), "caller left": _rate("vit_cancelled_total")}
    return [
        lines("Requests by endpoint", "reqps", {"{{endpoint}}": requests["endpoint"]}, "All answers.", stacked=True),
        lines(
            "Answers by status",
            "reqps",
            {"{{code}}": requests["code"]},
            "499: the caller left before the answer.",
            stacked=True,
        ),
        lines(
            "Refused and left",
            "reqps",
            refused,
            "Why images and requests were refused, by problem code.",
            stacked=True,
        ),
    ]


def _latency() -> list[Builder[Panel]]:
    requests = {name: _quantile(value, "vit_request_duration_seconds") for name, value in _QUANTILES.items()}
    stages = {
        f"{{{{stage}}}} {name}": _quantile(value, "vit_stage_duration_seconds", "le, stage")
        for name, value in _QUANTILES.items()
    }
    return [
        histogram(
            "Duration of /classify",
            "s",
            "vit_request_duration_seconds",
            _CLASSIFY,
            "How many requests took how long.",
        ),
        lines("Duration of all requests", "s", requests, "Quantiles over all endpoints."),
        lines(
            "Duration by stage",
            "s",
            stages,
            "read: the body arrives. decode: to the model's size. queue: the wait for a batch. inference: the batch.",
        ),
    ]


def _batches() -> list[Builder[Panel]]:
    launched = {"{{release}}": _rate("vit_batches_total", "release"), "empty rows": _rate("vit_batch_padding_total")}
    images = {
        "admitted": _all("vit_admitted_images"),
        "waiting for {{device}}": _all("vit_queue_depth", "device"),
        "requests": _all("vit_inflight_requests"),
        "limit": _all("vit_admitted_images_limit"),
    }
    return [
        histogram("Batch size", "short", "vit_batch_size", _OF, "Images in each batch that was launched."),
        lines(
            "Batches by reason",
            "short",
            launched,
            "full: the largest size was reached. idle: the device was free. delay: VIT_MAX_DELAY_MS was over.",
            stacked=True,
        ),
        lines("Images in the service", "short", images, "Images that wait or are computed, and the bound on them."),
    ]


def _answers() -> list[Builder[Panel]]:
    day = [f"sum(increase(vit_top1_score_{part}{{{_OF}}}[1d]))" for part in ("sum", "count")]
    scores = {
        "now": f"{_rate('vit_top1_score_sum')} / ({_rate('vit_top1_score_count')} > 0)",
        "last day": f"{day[0]} / ({day[1]} > 0)",
    }
    pushed_out = {"pictures per second": _rate("vit_recent_evicted_total")}
    return [
        histogram(
            "Score of the best label",
            "percentunit",
            "vit_top1_score",
            _OF,
            "How sure the model is. When this drifts, the pictures have changed.",
        ),
        lines("Mean score of the best label", "percentunit", scores, "Drift of the scores."),
        lines(
            "Kept pictures",
            "bytes",
            {"kept": _all("vit_recent_bytes")},
            "Memory of the pictures for GET /attention.",
            width=4,
        ),
        lines(
            "Pushed out early",
            "short",
            pushed_out,
            "Kept pictures that left before VIT_RECENT_TTL was over.",
            width=4,
        ),
    ]


def _engines() -> list[Builder[Panel]]:
    restarts = f"increase(vit_engine_restarts_total{{{_OF}}}[10m])"
    memory = f"process_resident_memory_bytes{{{_OF}}}"
    engine = "{{instance}} {{device}}"
    return [
        lines("Engines that are up", "none", {engine: f"vit_engine_up{{{_OF}}}"}, "1 while an engine answers."),
        lines("Engine restarts", "none", {engine: restarts}, "In ten minutes."),
        lines(
            "Memory of the process",
            "bytes",
            {"{{instance}}": memory},
            "Of services with one process. The container runtime knows the memory of those with several.",
        ),
    ]


def _gpus() -> list[Builder[Panel]]:
    def of(metric: str) -> dict[str, str]:
        return {_GPU: f"{metric}{{{_OF}}}"}

    memory = f"vit_gpu_memory_used_bytes{{{_OF}}} / vit_gpu_memory_total_bytes{{{_OF}}}"
    return [
        lines(
            "GPU utilisation",
            "percentunit",
            of("vit_gpu_utilization_ratio"),
            "Share of the time in which a kernel ran.",
            width=6,
        ),
        shares("GPU memory", memory, _GPU, "Memory that is used, of all.", ((None, "green"), (0.95, "red"))),
        lines("GPU power", "watt", of("vit_gpu_power_watts"), "As the driver tells.", width=6),
        lines(
            "Age of the readings",
            "s",
            of("vit_gpu_reading_age_seconds"),
            "Grows when the driver no longer answers.",
            width=6,
        ),
    ]


def _variable(name: str, labels: str) -> QueryVariable:
    """Return a variable for a label, of which one or several values can be chosen, or all."""
    return (
        QueryVariable(name)
        .label(name)
        .datasource(SOURCE)
        .query(f"label_values(vit_requests_total{{{labels}}}, {name})")
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
    )


def dashboard() -> Dashboard:
    """Return the dashboard, from what users notice to what it comes from."""
    built = (
        Dashboard("vitserve")
        .uid("vitserve")
        .description("Image classification: traffic, errors, latency, batches, saturation, scores, engines, GPUs.")
        .tags(["vitserve"])
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .refresh("10s")
        .time("now-1h", "now")
        .with_variable(DatasourceVariable("source").label("data source").type("prometheus"))
        .with_variable(_variable("job", ""))
        .with_variable(_variable("instance", 'job=~"$job"'))
    )
    rows: dict[str, list[Builder[Any]]] = {
        "Now": _now(),
        "Traffic and errors": _traffic(),
        "Latency": _latency(),
        "Batches and saturation": _batches(),
        "Answers": _answers(),
        "Engines and processes": _engines(),
        "GPUs": _gpus(),
    }
    for title, panels in rows.items():
        built.with_row(Row(title))
        for panel in panels:
            built.with_panel(panel)
    return built


def render() -> str:
    """Return the dashboard as JSON."""
    return JSONEncoder(sort_keys=True, indent=2).encode(dashboard().build()) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render())
    sys.stdout.write(f"wrote {TARGET}\n")
