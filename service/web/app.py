"""The ASGI application: routes, middleware, and their shared objects.

Engines are handed in: nothing here imports a model or torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from service.engine.messages import EngineStatus, ModelInfo
from service.lifecycle import Lifecycle
from service.models.model import ServedModel
from service.observe.metrics import Metrics, Sources
from service.settings import MEMORY, Settings, exports_spans, parse_keys
from service.web.admission import ByteBudget, Limiter, Receiving, RefusalPace
from service.web.api_keys import ApiKeyMiddleware, KeyGuard, KeyLimiter
from service.web.decoders import Decoders
from service.web.image_stores import ImageStore
from service.web.image_stores.memory import MemoryImageStore
from service.web.image_stores.redis import RedisImageStore
from service.web.middleware import PROBES, ProblemMiddleware, RequestContextMiddleware
from service.web.request import Lanes, Service
from service.web.routes import (
    attention,
    classify,
    embed,
    inference_protocol,
    operations,
    other_servers,
    pages,
)
from service.web.routes.endpoint import Application, Endpoint, no_such_path
from vitserve import __version__

logger = logging.getLogger("vitserve")

_ROUTERS = (
    pages.router,
    classify.router,
    embed.router,
    attention.router,
    operations.router,
    other_servers.router,
    inference_protocol.router,
)
_PUBLIC = pages.PUBLIC | inference_protocol.PUBLIC | other_servers.PUBLIC | {"/healthz", "/readyz"}


def image_store_of(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> ImageStore:
    """Return the image store of the settings: in Redis, or in memory of this process; raises `SettingsError`."""
    url = settings.recent_url.get_secret_value()
    if url == MEMORY:
        return MemoryImageStore(ttl=settings.recent_ttl, max_bytes=settings.recent_bytes, clock=clock)
    return RedisImageStore(
        url,
        name=settings.model_name or settings.checkpoint,
        ttl=settings.recent_ttl,
        max_bytes=settings.recent_bytes,
        failed=metrics.recent_errors.inc,
        clock=clock,
    )


def create_app(
    settings: Settings,
    engine: ServedModel,
    metrics: Metrics,
    lifecycle: Lifecycle | None = None,
    on_engine_change: Callable[[], None] = lambda: None,
    limiter: Limiter | None = None,
    image_store: ImageStore | None = None,
    byte_budget: ByteBudget | None = None,
    key_limiter: KeyLimiter | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> RequestContextMiddleware:
    """Return the ASGI application around an engine.

    Args:
        engine: of the models that are served one after another; started and closed with the application.
        metrics: the same that the engine's owner counts batches in.
        lifecycle: shared with the server that decides when to stop.
        on_engine_change: called on the event loop after each change of the engine's state.
        limiter, image_store, byte_budget, key_limiter: shared with other processes; by default this application's own.
    """
    lifecycle = lifecycle or Lifecycle()
    limiter = limiter or Limiter(settings.queue_size)
    images = image_store or image_store_of(settings, metrics, clock)
    receiving = Receiving(
        byte_budget or ByteBudget(settings.max_receiving_bytes),
        spacious=max(1, settings.queue_size // 8),
        turnover=settings.request_timeout / 2,
        clock=clock,
    )
    decoders = Decoders(settings, on_restart=metrics.decoder_restarts.inc)
    lanes = Lanes(settings, engine, decoders, clock)
    service = Service(engine, settings, metrics, limiter, receiving, images, lifecycle, lanes, decoders, clock)

    def engine_changed() -> None:
        for replica in engine.current.engine.engines:
            if replica.info is not None:
                metrics.set_model(replica.info, __version__)
        on_engine_change()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start(engine_changed)
        async with AsyncExitStack() as beside:
            if settings.grpc_port is not None:
                from service.web.grpc.server import serving  # noqa: PLC0415  it needs the extra `grpc`

                await beside.enter_async_context(serving(service, guard, outermost.count, settings.grpc_port))
            yield
        await engine.close()
        lanes.close()
        decoders.close()
        if tracing is not None:
            await tracing.close()
        await images.close()
        outermost.log.end_second()

    app = Application(
        title="vitserve",
        version=__version__,
        description="Image classification with a Vision Transformer.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # `service.web.routes.pages` has it
    )

    app.state.service = service
    app.set_routes([route for router in _ROUTERS for route in router.routes])
    app.router.default = no_such_path

    metrics.watch(
        Sources(
            statuses=lambda: [replica.status for replica in engine.current.engine.engines],
            recent=images.usage,
            places=lambda: (limiter.taken, limiter.capacity),
            reloads=lambda: engine.loads,
        )
    )

    app.state.public = public = _PUBLIC | {"/metrics"} if settings.metrics_public else _PUBLIC
    keys = parse_keys(key.get_secret_value() for key in settings.api_keys)
    app.state.keys_required = bool(keys)
    guard = KeyGuard(keys, key_limiter or KeyLimiter(len(keys), settings.key_max_requests), metrics)
    layers: ASGIApp = ApiKeyMiddleware(app, guard, public) if keys else app
    layers = ProblemMiddleware(layers, metrics, RefusalPace(clock))
    if settings.cors_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID", "traceparent", "tracestate"],
            expose_headers=["X-Request-ID", "Retry-After", "Content-Location", "traceresponse"],
        )
    tracing = None
    if exports_spans():
        from service.observe.spans import Tracing  # noqa: PLC0415  it needs the extra `otel`

        tracing = Tracing()
        layers = tracing.around(layers, PROBES)
    endpoints = {route.path for route in app.router.routes if isinstance(route, Endpoint)}
    outermost = RequestContextMiddleware(layers, metrics, endpoints, lifecycle, clock=clock)
    return outermost


def log_model(status: EngineStatus, info: ModelInfo) -> None:
    """Log the description of the served model."""
    served = (__version__, info.name, info.source, info.device, info.dtype, info.backend, status.compiled)
    logger.info("vitserve %s: %s from %s on %s in %s, %s, compile: %s", *served)
