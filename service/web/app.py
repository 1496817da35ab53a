"""The ASGI application: routes, middleware, and their shared objects.

Engines are handed in: nothing here imports a model or torch.
"""

from __future__ import annotations

import importlib.metadata
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service.engine.messages import EngineStatus, ModelInfo
from service.engine.swapping import Generation, Swappable
from service.http.lifecycle import Lifecycle
from service.metrics.metrics import Metrics, Sources
from service.settings import MEMORY, Settings, parse_keys
from service.web.admission import Limiter, RefusalPace
from service.web.image_store import AtHand, ImageStore, MemoryImageStore, SharedPictures
from service.web.keys import ApiKeyMiddleware, KeyGuard, KeyLimiter
from service.web.middleware import LingerLimits, ProblemMiddleware, RequestContextMiddleware
from service.web.openapi import describe_keys, drop_null_parameters
from service.web.pipeline import Lanes, Pipeline, Pipelines
from service.web.receiving import MIN_BODY_RATE, ByteBudget, Receiving
from service.web.redis_image_store import RedisImageStore
from service.web.routes import (
    attention,
    classify,
    documentation,
    embed,
    inference_protocol,
    model_repository,
    operations,
    page,
)
from service.web.routes.endpoint import Endpoint, no_such_path

if TYPE_CHECKING:
    from service.tracing.spans import RequestTracer

logger = logging.getLogger("vitserve")

VERSION = importlib.metadata.version("vitserve")

_ROUTERS = (
    classify.router,
    embed.router,
    attention.router,
    operations.router,
    inference_protocol.router,
    model_repository.router,
    documentation.router,
)
_PUBLIC = documentation.PUBLIC | page.PUBLIC | inference_protocol.PUBLIC | {"/healthz", "/readyz"}


class _Application(FastAPI):
    """FastAPI without its layers: `ProblemMiddleware` answers errors, and no route leaves a context open."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, which names the operations that take a key."""
        if self.openapi_schema is None:
            document = super().openapi()
            drop_null_parameters(document)
            describe_keys(document, self.state.public, required=self.state.keys_required)
        return super().openapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.router(scope, receive, send)


def kept_pictures(
    settings: Settings, store: ImageStore | None, metrics: Metrics, clock: Callable[[], float]
) -> SharedPictures:
    """Return where pictures are kept: in Redis, in `store`, or in memory of this process; raises `SettingsError`."""
    limits = {"ttl": settings.recent_ttl, "max_bytes": settings.recent_bytes, "clock": clock}
    url = settings.recent_url.get_secret_value()
    if url == MEMORY:
        return AtHand(store or MemoryImageStore(**limits))  # type: ignore[arg-type]
    name = settings.model_name or settings.checkpoint
    return RedisImageStore(url, name=name, failed=metrics.recent_errors.inc, **limits)  # type: ignore[arg-type]


def create_app(
    settings: Settings,
    engine: Swappable,
    metrics: Metrics,
    lifecycle: Lifecycle | None = None,
    on_engine_change: Callable[[], None] = lambda: None,
    limiter: Limiter | None = None,
    image_store: ImageStore | None = None,
    byte_budget: ByteBudget | None = None,
    key_limiter: KeyLimiter | None = None,
    tracer: RequestTracer | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
    linger: LingerLimits | None = None,
    hold_seconds: float = 0.5,
) -> RequestContextMiddleware:
    """Return the ASGI application around an engine.

    Args:
        engine: of the models that are served one after another; started and closed with the application.
        metrics: the same that the engine's owner counts batches in.
        lifecycle: shared with the server that decides when to stop.
        on_engine_change: called on the event loop after each change of the engine's state.
        limiter: one that other processes count in too; by default this application's own.
        image_store: one that other processes keep pictures in too; by default this application's own.
        byte_budget: one that other processes take bytes from too; by default this application's own.
        key_limiter: one that other processes count in too; by default this application's own.
        tracer: makes the spans of requests; None if nobody asked for them.
        clock: monotonic seconds, for requests' deadlines and durations.
        hold_seconds: after which a request that finds no engine is refused, see `ProblemMiddleware`.
    """
    lifecycle = lifecycle or Lifecycle()
    limiter = limiter or Limiter(settings.queue_size)
    pictures = kept_pictures(settings, image_store, metrics, clock)
    receiving = Receiving(
        byte_budget or ByteBudget(settings.max_receiving_bytes),
        min_rate=MIN_BODY_RATE,
        spacious=max(1, settings.queue_size // 8),
        turnover=settings.request_timeout / 2,
        clock=clock,
    )
    lanes = Lanes(settings, metrics.decoder_restarts.inc)

    def engine_changed() -> None:
        for replica in engine.current.engine.engines:
            if replica.info is not None:
                metrics.set_model(replica.info, VERSION)
        on_engine_change()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start(engine_changed)
        async with AsyncExitStack() as beside:
            if settings.grpc_port is not None:
                from service.web.grpc.server import serving  # noqa: PLC0415  it needs the extra `grpc`

                calls = serving(pipelines, guard, outermost.count, port=settings.grpc_port, hold_seconds=hold_seconds)
                await beside.enter_async_context(calls)
            yield
        await engine.close()
        lanes.close()
        await pictures.close()
        outermost.log.end_second()

    app = _Application(
        title="vitserve",
        version=VERSION,
        description="Image classification with a Vision Transformer.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # `service.web.routes.documentation` has it
    )

    def make_pipeline(generation: Generation) -> Pipeline:
        return Pipeline(generation, settings, metrics, limiter, receiving, pictures, lifecycle, lanes, clock, tracer)

    app.state.pipelines = pipelines = Pipelines(engine, make_pipeline)
    # The first route of a path answers: with the page, `operations` keeps its plain index to itself.
    routers = (page.router, *_ROUTERS) if settings.page else _ROUTERS
    app.router.routes = [route for router in routers for route in router.routes]
    app.router.default = no_such_path

    metrics.watch(
        Sources(
            statuses=lambda: [replica.status for replica in engine.current.engine.engines],
            recent=pictures.usage,
            places=lambda: (limiter.taken, limiter.capacity),
            reloads=lambda: engine.reloads,
        )
    )

    app.state.public = public = _PUBLIC | {"/metrics"} if settings.metrics_public else _PUBLIC
    keys = parse_keys(key.get_secret_value() for key in settings.api_keys)
    app.state.keys_required = bool(keys)
    guard = KeyGuard(keys, key_limiter or KeyLimiter(len(keys), settings.key_max_requests), metrics)
    pace = RefusalPace()
    layers: ASGIApp = ProblemMiddleware(ApiKeyMiddleware(app, guard, public), metrics, pace, hold_seconds=hold_seconds)
    if settings.cors_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID", "traceparent", "tracestate"],
            expose_headers=["X-Request-ID", "Retry-After", "Content-Location", "traceresponse"],
        )
    endpoints = {route.path for route in app.router.routes if isinstance(route, Endpoint)}
    outermost = RequestContextMiddleware(
        layers, metrics, endpoints, lifecycle, tracer, pace=pace, clock=clock, linger=linger
    )
    return outermost


def log_model(status: EngineStatus, info: ModelInfo) -> None:
    """Log the description of the served model."""
    served = (VERSION, info.name, info.source, info.device, info.dtype, info.backend, status.compiled)
    logger.info("vitserve %s: %s from %s on %s in %s, %s, compile: %s", *served)
