"""The application around a fake engine, and its settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from service.metrics.metrics import Metrics
from service.settings import Settings, load_settings
from service.web.app import create_app
from service.web.lifecycle import Lifecycle
from service.web.pipeline import Pipeline
from tests.service.fakes import Exchange, FakeEngine, png


@dataclass
class App:
    """One application; `request` sends it one HTTP request."""

    settings: Settings
    engine: FakeEngine = field(default_factory=FakeEngine)
    metrics: Metrics = field(default_factory=Metrics)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)

    def __post_init__(self) -> None:
        self.asgi = create_app(self.settings, self.engine, self.metrics, self.lifecycle)

    def exchange(self, method: str, path: str, **options: Any) -> Exchange:
        return Exchange(self.asgi, method, path, **options)

    async def request(self, method: str, path: str, **options: Any) -> Exchange:
        return await self.exchange(method, path, **options).run()

    async def get(self, path: str, query: str = "", **headers: str) -> Exchange:
        return await self.request("GET", path, query=query, headers=headers)

    async def classify(self, body: bytes | None = None, query: str = "", path: str = "/classify") -> Exchange:
        """Post a picture as a raw body; by default one that is fine."""
        body = png(7) if body is None else body
        return await self.request("POST", path, query=query, headers={"content-type": "image/png"}, body=body)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def app(**settings: Any) -> App:
    return App(load_settings({"decode_threads": 1, **settings}))


def pipeline_of(running: App) -> Pipeline:
    """The pipeline inside, to fill its places; found below the middleware."""
    layer: Any = running.asgi
    while not hasattr(layer, "state"):
        layer = getattr(layer, "app", None) or layer._app
    pipeline: Pipeline = layer.state.pipeline
    return pipeline
