"""The application around a fake engine, its settings, and helpers of tests."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from service.draining import Lifecycle
from service.models.all_models import Models
from service.models.local_model import LocalModel
from service.observe.metrics import Metrics
from service.settings import Settings, load_settings
from service.web.app import create_app
from service.web.image_stores import ImageStore
from service.web.limiter import ByteBudget
from service.web.service import Service
from tests.service.fakes import FixedModels, png
from tests.service.web.fake_engine import FakeEngine
from tests.service.web.http_communicator import HttpCommunicator

BOUNDARY = "b0undary"


class Clock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


@dataclass
class App:
    """An application; `request` sends it one HTTP request."""

    settings: Settings
    engine: FakeEngine = field(default_factory=FakeEngine)
    metrics: Metrics = field(default_factory=Metrics)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    clock: Callable[[], float] = time.monotonic
    models: Models | None = None
    image_store: ImageStore | None = None

    def __post_init__(self) -> None:
        self.asgi = create_app(
            self.settings,
            self.models or FixedModels({"": LocalModel(lambda _: cast(Any, self.engine))}),
            self.metrics,
            self.lifecycle,
            clock=self.clock,
            image_store=self.image_store,
        )

    def communicator(self, method: str, path: str, **options: Any) -> HttpCommunicator:
        return HttpCommunicator(self.asgi, method, path, **options)

    async def request(self, method: str, path: str, **options: Any) -> HttpCommunicator:
        return await self.communicator(method, path, **options).run()

    async def get(self, path: str, query: str = "", **headers: str) -> HttpCommunicator:
        return await self.request("GET", path, query=query, headers=headers)

    async def classify(
        self, body: bytes | None = None, query: str = "", path: str = "/classify"
    ) -> HttpCommunicator:
        """Post a picture as a raw body; by default a valid one."""
        body = png(7) if body is None else body
        return await self.request(
            "POST", path, query=query, headers={"content-type": "image/png"}, body=body
        )

    def metric(self, name: str, **labels: str) -> float:
        samples = (
            sample for family in self.metrics.registry.collect() for sample in family.samples
        )
        return sum(
            each.value
            for each in samples
            if each.name == name and labels.items() <= each.labels.items()
        )


def app(clock: Callable[[], float] = time.monotonic, **settings: Any) -> App:
    return App(load_settings({**settings}), clock=clock)


def inside(running: App) -> Any:
    """Return the application below the middleware."""
    layer: Any = running.asgi
    while not hasattr(layer, "state"):
        layer = getattr(layer, "app", None) or layer._app
    return layer


def service_in(running: App) -> Service:
    """Return the shared objects, so that a test can occupy slots."""
    service: Service = inside(running).state.service
    return service


def budget_of(running: App) -> ByteBudget:
    """Return the budget of bytes."""
    return service_in(running).byte_budget


def form(
    *files: bytes,
    fields: Mapping[str, str] = MappingProxyType({}),
    file_names: Sequence[str] = (),
) -> dict[str, Any]:
    """Return headers and body of a form with `file` parts, after other fields."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="'
    body = "".join(f'{head}{name}"\r\n\r\n{value}\r\n' for name, value in fields.items()).encode()
    for data, name in zip(files, file_names or ["a"] * len(files), strict=True):
        body += f'{head}file"; filename="{name}"\r\n\r\n'.encode() + data + b"\r\n"
    body += f"--{BOUNDARY}--\r\n".encode()
    return {"headers": {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}, "body": body}


async def kept(service: App, red: int = 100) -> str:
    """Classify a picture; return its id."""
    image_id: str = (await service.classify(png(red))).json["id"]
    return image_id


async def settle() -> None:
    """Run the event loop until all tasks wait for an outside event."""
    for _ in range(100):
        await asyncio.sleep(0)
