"""The ASGI application: routes, middleware, and their shared objects.

Engines are handed in: nothing here imports a model or torch.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from service.background import keep_running
from service.engine.messages import EngineStatus, ModelInfo
from service.extensions.compatibility import routes as compatibility
from service.extensions.inference_protocol import routes as inference_protocol
from service.extensions.redis.image_store import RedisImageStore
from service.extensions.teach import routes as heads
from service.extensions.teach.examples import Examples
from service.extensions.teach.heads import TaughtHeads
from service.lifecycle import Lifecycle
from service.models.registry import Models
from service.observe.metrics import Metrics, Sources
from service.settings import MEMORY, Settings, exports_spans
from service.web import problems
from service.web.admission import RECEIVING_BYTES, Limiter, Receiving, RefusalPace
from service.web.api_keys import ApiKeyMiddleware, KeyGuard
from service.web.decoders import Decoders
from service.web.image_stores import ImageStore, MemoryImageStore
from service.web.lanes import Lanes
from service.web.middleware import PROBES, ProblemMiddleware, RequestContextMiddleware
from service.web.origins import OriginMiddleware, split_origins
from service.web.prefix import Prefixes
from service.web.routes import attention, classify, classify_batch, embed, operations, pages
from service.web.routes import models as models_routes
from service.web.routes.endpoint import Application, Endpoint
from service.web.routes.not_found import no_such_path
from service.web.service import Service
from vitserve import __version__

logger = logging.getLogger("vitserve")

_ROUTERS = (
    pages.router,
    classify.router,
    classify_batch.router,
    embed.router,
    attention.router,
    operations.router,
    models_routes.router,
    heads.router,
    compatibility.router,
    inference_protocol.router,
)
_PUBLIC = pages.PUBLIC | inference_protocol.PUBLIC | compatibility.PUBLIC | {"/healthz", "/readyz"}


def image_store_of(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> ImageStore:
    """Return the image store of the settings: in Redis, or in memory of this process; raises
    `SettingsError`.
    """
    url = settings.recent_url.get_secret_value()
    if url == MEMORY:
        return MemoryImageStore(
            ttl=settings.recent_ttl,
            max_bytes=settings.recent_bytes,
            clock=clock,
            on_evicted=metrics.recent_evicted_age.observe,
        )
    return RedisImageStore(
        url,
        name=settings.models or settings.model_name or settings.checkpoint,
        ttl=settings.recent_ttl,
        max_bytes=settings.recent_bytes,
        failed=metrics.recent_errors.inc,
        clock=clock,
    )


def create_app(
    settings: Settings,
    models: Models,
    metrics: Metrics,
    lifecycle: Lifecycle | None = None,
    on_engine_change: Callable[[], None] = lambda: None,
    image_store: ImageStore | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> RequestContextMiddleware:
    """Return the ASGI application around models.

    Args:
        models: started and closed with the application.
        metrics: the same that the engine's owner counts batches in.
        lifecycle: shared with the server that decides when to stop.
        on_engine_change: called on the event loop after each change of a model's state.
        image_store: shared with other processes; by default this application's own.
    """
    taught = None if settings.teach is None else Examples(Path(settings.teach).expanduser())
    folder = None if settings.models is None else Path(settings.models).expanduser()
    images = image_store or image_store_of(settings, metrics, clock)
    decoders = Decoders(settings, on_restart=metrics.decoder_restarts.inc)
    service = Service(
        models,
        settings,
        metrics,
        Limiter(settings.queue_size),
        Receiving(max(RECEIVING_BYTES // settings.workers, settings.max_request_bytes), clock),
        images,
        lifecycle or Lifecycle(),
        Lanes(settings, models, lambda: decoders.processes, clock),
        decoders,
        TaughtHeads(taught, folder, models),
        clock=clock,
    )
    metrics.watch(
        Sources(
            statuses=models.statuses,
            recent=images.usage,
            places=lambda: (service.limiter.in_use, service.limiter.capacity),
            names=lambda: set(models.names()),
            results=lambda: models.results,
            backbones=models.backbones,
            states=lambda: {each.name: each.state for each in models.describe()},
            reloads=models.reloads,
            recent_ttl=settings.recent_ttl,
        )
    )
    for code in problems.CODES:
        metrics.rejected.labels(
            code
        )  # a rate needs a series that stands at 0 before the first refusal
    app = Application(
        title="vitserve",
        version=__version__,
        description="Image classification with a Vision Transformer.",
        lifespan=_lifespan,
        redirect_slashes=False,
        openapi_url=None,  # `service.web.routes.pages` has it
    )
    app.set_routes([route for router in _ROUTERS for route in router.routes])
    app.router.default = no_such_path
    app.state.service = service
    app.state.keys_required = bool(settings.api_keys)
    app.state.public = _PUBLIC | {"/metrics"} if settings.metrics_public else _PUBLIC
    app.state.guard = KeyGuard(settings.api_keys, settings.key_max_requests, metrics)
    app.state.on_engine_change = partial(_publish_model, service, on_engine_change)
    app.state.tracing = None
    if exports_spans():
        from service.extensions.tracing.spans import Tracing  # noqa: PLC0415  it needs the extra `otel`

        app.state.tracing = Tracing()
    app.state.outermost = outermost = _surrounded(app, service)
    return outermost


def _surrounded(app: Application, service: Service) -> RequestContextMiddleware:
    """Return the application inside its middleware, see `service.web.middleware`."""
    state, settings, metrics = app.state, service.settings, service.metrics
    layers: ASGIApp = (
        ApiKeyMiddleware(app, state.guard, state.public, settings) if state.keys_required else app
    )
    layers = OriginMiddleware(layers, settings)
    layers = ProblemMiddleware(layers, metrics, RefusalPace(service.clock))
    if settings.cors_origins:
        exact, pattern = split_origins(settings.cors_origins)
        layers = CORSMiddleware(
            layers,
            allow_origins=exact,
            allow_origin_regex=pattern,
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],  # the key protects, not a list of headers
            expose_headers=["X-Request-ID", "Retry-After", "Content-Location", "traceresponse"],
        )
    if state.tracing is not None:
        layers = state.tracing.around(layers, PROBES)
    endpoints = {route.path for route in app.router.routes if isinstance(route, Endpoint)}
    prefixes = Prefixes(settings.root_path, endpoints)
    return RequestContextMiddleware(
        layers,
        metrics,
        endpoints,
        service.lifecycle,
        service.receiving,
        prefixes,
        clock=service.clock,
    )


def _publish_model(service: Service, on_engine_change: Callable[[], None]) -> None:
    """Publish which models the engines have, and tell their owner of the change."""
    served = [
        replica
        for model in service.models.served.values()
        for replica in model.current.engine.engines
    ]
    service.taught.renew()
    service.metrics.set_models(
        [replica.info for replica in served if replica.info is not None], __version__
    )
    on_engine_change()


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the model and the port of gRPC; in the end, close what requests need."""
    state = app.state
    service: Service = state.service
    service.models.start(state.on_engine_change)
    async with AsyncExitStack() as beside:
        if service.settings.grpc_port is not None:
            from service.extensions.inference_protocol.grpc.calls import serving  # noqa: PLC0415  it needs the extra `grpc`

            grpc = serving(service, state.guard, state.outermost.count, service.settings.grpc_port)
            await beside.enter_async_context(grpc)
        watching = keep_running("taught-heads", service.taught.watch)
        yield
    watching.cancel()
    await service.models.close()
    service.lanes.close()
    service.decoders.close()
    if state.tracing is not None:
        await state.tracing.close()
    await service.images.close()
    state.outermost.log.end_second()


def log_model(status: EngineStatus, info: ModelInfo) -> None:
    """Log the description of the served model."""
    named = (__version__, info.name, info.source, info.content)
    computed = (info.device, info.dtype, info.backend, status.compiled)
    logger.info(
        "vitserve %s: %s from %s (content %s) on %s in %s, %s, compile: %s", *named, *computed
    )
