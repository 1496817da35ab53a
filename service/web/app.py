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
from service.engine.swapping import Generation, Swappable
from service.http.lifecycle import Lifecycle
from service.observe.metrics import Metrics, Sources
from service.settings import MEMORY, Settings, exports_spans, parse_keys
from service.web.admission import ByteBudget, Limiter, Receiving, RefusalPace
from service.web.api_keys import ApiKeyMiddleware, KeyGuard, KeyLimiter
from service.web.image_stores import KeptPictures
from service.web.image_stores.memory import AtHand, ImageStore, MemoryImageStore
from service.web.image_stores.redis import RedisImageStore
from service.web.middleware import PROBES, ProblemMiddleware, RequestContextMiddleware
from service.web.pipeline import Pipeline, Pipelines, Pools
from service.web.routes import (
    attention,
    classify,
    embed,
    inference_protocol,
    model_repository,
    operations,
    other_servers,
    pages,
)
from service.web.routes.endpoint import Application, Endpoint, no_such_path
from vitserve import __version__

logger = logging.getLogger("vitserve")

_ROUTERS = (
    classify.router,
    embed.router,
    attention.router,
    operations.router,
    other_servers.router,
    inference_protocol.router,
    model_repository.router,
    pages.documentation,
)
_PUBLIC = pages.PUBLIC | inference_protocol.PUBLIC | other_servers.PUBLIC | {"/healthz", "/readyz"}


def kept_pictures(
    settings: Settings, store: ImageStore | None, metrics: Metrics, clock: Callable[[], float]
) -> KeptPictures:
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
    pictures = kept_pictures(settings, image_store, metrics, clock)
    receiving = Receiving(
        byte_budget or ByteBudget(settings.max_receiving_bytes),
        spacious=max(1, settings.queue_size // 8),
        turnover=settings.request_timeout / 2,
        clock=clock,
    )
    pools = Pools(settings, metrics.decoder_restarts.inc)

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

                await beside.enter_async_context(serving(pipelines, guard, outermost.count, settings.grpc_port))
            yield
        await engine.close()
        pools.close()
        if tracing is not None:
            await tracing.close()
        await pictures.close()
        outermost.log.end_second()

    app = Application(
        title="vitserve",
        version=__version__,
        description="Image classification with a Vision Transformer.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # `service.web.routes.pages` has it
    )

    def make_pipeline(generation: Generation) -> Pipeline:
        return Pipeline(generation, settings, metrics, limiter, receiving, pictures, lifecycle, pools, clock)

    app.state.pipelines = pipelines = Pipelines(engine, make_pipeline)
    # The first route of a path answers: with the page, `operations` keeps its plain index to itself.
    routers = (pages.page, *_ROUTERS) if settings.page else _ROUTERS
    app.set_routes([route for router in routers for route in router.routes])
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
    pace = RefusalPace(clock)
    layers: ASGIApp = ApiKeyMiddleware(app, guard, public) if keys else app
    layers = ProblemMiddleware(layers, metrics, pace)
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
    outermost = RequestContextMiddleware(layers, metrics, endpoints, lifecycle, pace=pace, clock=clock)
    return outermost


def log_model(status: EngineStatus, info: ModelInfo) -> None:
    """Log the description of the served model."""
    served = (__version__, info.name, info.source, info.device, info.dtype, info.backend, status.compiled)
    logger.info("vitserve %s: %s from %s on %s in %s, %s, compile: %s", *served)
