"""A real Prometheus scrapes a real service: all queries of dashboard and rules have data."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from service.observe.gpus import GAUGES
from tests.conftest import REPOSITORY
from tests.e2e.serving import SIZE, Serve, Served
from tests.launcher import free_port, until
from tests.service.fakes import png
from tests.stub_server import answering

pytestmark = [
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed"),
    pytest.mark.timeout(120),
]

DASHBOARD = json.loads((REPOSITORY / "deploy/grafana/dashboards/vitserve.json").read_text())
RULES = REPOSITORY / "deploy/prometheus/rules"


class Prometheus:
    """A Prometheus that scrapes twice a second."""

    def __init__(self, folder: Path, *targets: str, options: tuple[str, ...] = ()) -> None:
        self.url = f"http://127.0.0.1:{free_port()}"
        configuration = {
            "global": {
                "scrape_interval": "500ms",
                "scrape_timeout": "500ms",
                "evaluation_interval": "500ms",
            },
            "rule_files": [str(RULES / "*.yml")],
            "scrape_configs": [
                {"job_name": "vitserve", "static_configs": [{"targets": list(targets)}]}
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        self.process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={file}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                *options,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the current series of an expression; none while Prometheus starts."""
        try:
            answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression})
        except httpx.ConnectError:
            return []
        assert answer.status_code in {200, 503}, (expression, answer.text)
        found: list[dict[str, Any]] = (
            answer.json()["data"]["result"] if answer.status_code == 200 else []
        )
        return found

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def gpu_exporter() -> Iterator[str]:
    """Serve the metrics of a GPU, without a GPU."""
    registry = CollectorRegistry()
    for name, text in GAUGES.items():
        Gauge(name, text, ["gpu"], registry=registry).labels("0").set(0.5)

    with answering(lambda _: (200, {}, generate_latest(registry))) as url:
        yield url.removeprefix("http://")


def panels() -> dict[str, list[str]]:
    """Return the queries of each panel over all jobs and instances.

    Their range is long enough to contain the traffic of slow tests.
    """
    values = {"$job": ".*", "$instance": ".*", "$__rate_interval": "30m"}
    found = {}
    for panel in DASHBOARD["panels"]:
        for nested in [panel, *panel.get("panels", [])]:
            queries = [target["expr"] for target in nested.get("targets", [])]
            for name, value in values.items():
                queries = [query.replace(name, value) for query in queries]
            assert "$" not in "".join(queries)
            found[nested["title"]] = queries
    return {title: queries for title, queries in found.items() if queries}


@pytest.fixture(scope="module")
def prometheus(
    serve_module: Serve, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A Prometheus that has scraped a service under load."""
    server = serve_module(recent_bytes=20_000)
    target = server.url.removeprefix("http://")
    with (
        gpu_exporter() as gpus,
        Prometheus(tmp_path_factory.mktemp("prometheus"), target, gpus) as started,
    ):
        until(lambda: len(started.query("up == 1")) == 2)
        # Each series is scraped once before it grows and once after.
        for _ in range(2):
            traffic(server)
            scraped = server.metric("vit_images_total")
            until(lambda at_least=scraped: bool(started.query(f"vit_images_total >= {at_least}")))  # type: ignore[misc]
        yield started


def traffic(server: Served) -> None:
    for red in range(40):
        assert server.classify(png(red, (SIZE, SIZE))).status_code == 200
    assert server.classify(b"\x89PNG\r\n\x1a\n damaged").status_code == 422
    image_id = server.classify(png(1)).json()["id"]
    assert server.get("/attention", params={"id": image_id}).status_code == 200


@pytest.mark.parametrize("title", panels())
def test_every_query_of_a_panel_has_data(title: str, prometheus: Prometheus) -> None:
    for query in panels()[title]:
        until(lambda query=query: bool(prometheus.query(query)))  # type: ignore[misc]
        assert (
            all(series["value"][1] != "NaN" for series in prometheus.query(query))
            or "quantile" in query
        ), query


@pytest.mark.parametrize("variable", ["job", "instance"])
def test_the_variables_offer_what_is_scraped(variable: str, prometheus: Prometheus) -> None:
    [query] = [one["query"] for one in DASHBOARD["templating"]["list"] if one["name"] == variable]
    selector = query.removeprefix("label_values(").rpartition(",")[0].replace("$job", ".*")
    assert [
        series["metric"][variable]
        for series in prometheus.query(f"group by ({variable}) ({selector})")
    ]


def test_every_recording_rule_has_data(
    prometheus: Prometheus,
) -> None:
    rules = yaml.safe_load((RULES / "recording.yml").read_text())["groups"][0]["rules"]
    for rule in rules:
        if "failed" not in rule["record"]:
            until(lambda rule=rule: bool(prometheus.query(rule["record"])))  # type: ignore[misc]
    assert len(rules) > 5


def test_no_alert_fires_on_a_healthy_service(prometheus: Prometheus) -> None:
    rules = httpx.get(f"{prometheus.url}/api/v1/rules", params={"type": "alert"}).json()["data"][
        "groups"
    ]
    states = {rule["name"]: rule["state"] for group in rules for rule in group["rules"]}
    written = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    assert set(states) == {rule["alert"] for group in written for rule in group["rules"]}
    assert "firing" not in states.values()
    assert all(rule["health"] == "ok" for group in rules for rule in group["rules"])
