"""The service as an application of Ray Serve: `serve run service.extensions.ray.replicas:app`.

A replica is the whole service in one process: the web application, the batch queue and the engine.
Ray starts replicas, gives each request to one of them, and replaces a replica whose `check_health`
fails. A stopping replica answers its accepted requests. No other file imports Ray.
"""

import asyncio
import logging
import os
from functools import partial
from typing import Any
from weakref import WeakSet

from prometheus_client import Metric, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from model.errors import first_problem
from service.engine.backbones import Backbones, Checkpoint, Loader, ModelEngine
from service.engine.devices import fit_to_machine
from service.engine.engine import BATCH_SECONDS
from service.engine.loading import load_predictor
from service.errors import EngineUnavailable, Forbidden, SettingsError
from service.extension import check
from service.extensions.ray.merged_metrics import MergedMetrics
from service.models.configured import configured_models
from service.models.local_models import LocalModels
from service.models.version import Version
from service.observe import logs
from service.observe.metrics import Metrics
from service.process_memory import freeze_objects, trim_regularly
from service.setting_values import MEMORY
from service.setting_warnings import check_variables
from service.settings import Settings, load_settings
from service.web.app import create_app, log_model

try:
    from ray import serve
    from ray.serve.exceptions import RayServeException
except ImportError as error:
    raise ImportError(f"Ray Serve is needed ({error}): pip install 'vitserve[ray]'") from None

logger = logging.getLogger("vitserve")

NAME = "vitserve"
"""The deployment's name."""

_SCRAPE_SECONDS = 5.0
"""Longest wait of the scraped replica for the metrics of the others."""

_HEALTH_SECONDS = 2.0
"""Interval of health checks; Ray replaces a replica after three failures."""


class Arguments(BaseModel):
    """Arguments of the application, as NAME=VALUE after `serve run`, or as `args` in a file."""

    model_config = ConfigDict(extra="forbid")

    replicas: int = Field(2, ge=1)
    cpus: float = Field(1, gt=0)
    """CPU cores per replica."""
    gpus: float = Field(0, ge=0)
    """GPUs per replica, possibly a fraction."""


def app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application; its settings come from the environment of the building process.

    Args:
        arguments: values for `Arguments`.

    Raises:
        SettingsError: a setting or an argument is unknown or invalid, or does not apply to a
            replica.
    """
    try:
        share = Arguments.model_validate(arguments)
    except ValidationError as error:
        raise SettingsError(f"an argument of the application: {first_problem(error)}") from None
    settings = replica_settings(load_settings(), share)
    for line in check_variables(settings, os.environ):
        logger.warning("%s", line)
    if share.replicas > 1 and settings.recent_url.get_secret_value() == MEMORY:
        logger.warning(
            "each replica keeps its own pictures: "
            "GET /attention?id=... needs VIT_RECENT_URL=redis://..."
        )
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name=NAME,
        num_replicas=share.replicas,
        # A replica refuses requests itself when it is full. Beyond this number, requests wait in
        # Ray's proxy.
        max_ongoing_requests=2 * settings.queue_size,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=BATCH_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_timeout,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus},
        # The service itself logs each request, with its path.
        logging_config={"enable_access_log": False},
    )
    return deployment.bind(settings)


def replica_settings(settings: Settings, share: Arguments) -> Settings:
    """Return the settings of a replica.

    Raises:
        SettingsError: the settings name several processes or devices, but a replica has one.
    """
    if settings.device == "all" or not settings.one_process:
        raise SettingsError(
            "VIT_WORKERS and VIT_DEVICE: a replica has one process and one device; set `replicas`"
        )
    check(settings)
    return fit_to_machine(settings).model_copy(update={"workers": 1})


class Replica:
    """One replica; Ray creates and calls it in a process of its own.

    Args:
        settings: settings of the replica.
        load: loader of predictors, called on the engine's thread.
    """

    def __init__(self, settings: Settings, load: Loader = load_predictor) -> None:
        logs.configure(settings.log_format, settings.log_level)
        self._settings = settings
        self._metrics = _ReplicaMetrics()
        self._metrics.observe_process()
        make = Backbones(settings, load, self._metrics.observe_batch).engine
        self._models = _FixedModels(settings, make, configured_models(settings))
        self._loaded = asyncio.Event()
        self._logged: WeakSet[Version[ModelEngine]] = WeakSet()
        trim_regularly()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the ASGI application; Ray passes it all requests and the lifespan messages."""
        changed = self._on_engine_change
        service = create_app(self._settings, self._models, self._metrics, on_engine_change=changed)

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await service(scope, receive, partial(_send_without_request_id, send))

        return application

    async def check_health(self) -> None:
        """Wait until the model is loaded; raises `EngineUnavailable` if it does not serve.

        Ray calls it before it sends requests, and then at an interval.
        """
        await self._loaded.wait()
        if self._models.failure or not self._models.default.current.engine.ready:
            raise EngineUnavailable(
                self._models.failure or self._models.default.current.engine.status.reason
            )

    async def own_metrics(self) -> tuple[str, list[Metric]]:
        """Return the name and the metrics of this replica."""
        return self._metrics.own()

    def _on_engine_change(self) -> None:
        engine = self._models.default.current.engine
        if engine.ready or self._models.failure:
            self._loaded.set()
        for model in self._models.served.values():
            if (
                model.info is not None
                and model.current not in self._logged
                and model.current.engine.ready
            ):
                self._logged.add(model.current)
                freeze_objects()
                log_model(model.current.engine.status, model.info)


class _FixedModels(LocalModels):
    """Models that cannot be replaced, because only one replica would replace them."""

    async def put(self, name: str, checkpoint: Checkpoint) -> bool:
        """Raise `Forbidden`."""
        raise Forbidden(
            "replicas do not swap checkpoints: restart the service with another checkpoint"
        )

    async def unload(self, name: str) -> None:
        """Raise `Forbidden`."""
        await self.put(name, None)

    async def delete(self, name: str) -> None:
        """Raise `Forbidden`."""
        await self.put(name, None)


async def _send_without_request_id(send: Send, message: Message) -> None:
    """Send a message without `X-Request-ID`, because Ray's proxy adds the same header."""
    if message["type"] == "http.response.start":
        headers = [header for header in message["headers"] if header[0] != b"x-request-id"]
        message = {**message, "headers": headers}
    await send(message)


class _ReplicaMetrics(Metrics):
    """The metrics of a replica; a scrape collects all replicas, because it cannot choose one."""

    def __init__(self) -> None:
        super().__init__()
        self._replicas: Any = None

    def own(self) -> tuple[str, list[Metric]]:
        """Return the name and the metrics of this replica."""
        return serve.get_replica_context().replica_id.unique_id, list(self.collect())

    async def gather(self) -> bytes:
        """Return the metrics of all replicas that answer in time, with the label `replica`."""
        if self._replicas is None:
            self._replicas = serve.get_deployment_handle(NAME, serve.get_replica_context().app_name)
        answers = []
        try:
            responses = self._replicas.broadcast("own_metrics")
            answers = await responses.results_async(
                timeout_s=_SCRAPE_SECONDS, return_exceptions=True
            )
        except (TimeoutError, RayServeException) as error:
            logger.warning("no metrics from the other replicas: %s", error)
        own = dict([self.own()])
        others = dict(answer for answer in answers if not isinstance(answer, BaseException))
        return await asyncio.to_thread(generate_latest, MergedMetrics(others | own))
