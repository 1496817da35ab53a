"""The ASGI application: routes, middleware and shared objects of one web process.

The caller supplies the engines: this module imports neither models nor torch.
"""

import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Final, NoReturn

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from service.draining import Lifecycle, exit_now
from service.engine.messages import EngineStatus, ModelInfo
from service.extension import Extension, Routes, extensions, extensions_by_scheme, naming
from service.models.all_models import Models
from service.observe.metrics import Metrics
from service.observe.state import Sources
from service.setting_values import MEMORY
from service.settings import Settings
from service.web import problems
from service.web.added_routes import with_added_routes
from service.web.api_keys import ApiKeyMiddleware, KeyGuard
from service.web.decoders import Decoders
from service.web.image_stores import ImageStore, MemoryImageStore
from service.web.lanes import Lanes
from service.web.limiter import RECEIVING_BYTES, ByteBudget, Limiter
from service.web.middleware import ProblemMiddleware, RequestContextMiddleware
from service.web.origins import OriginMiddleware, split_origins
from service.web.path_rules import PathRules
from service.web.prefix import Prefixes
from service.web.refusal_pace import RefusalPace
from service.web.routes import (
    attention,
    classify,
    classify_batch,
    embed,
    health,
    model,
    pages,
)
from service.web.routes import models as models_routes
from service.web.routes.endpoint import Application
from service.web.service import Service
from vitserve import __version__

logger = logging.getLogger("vitserve")

_ROUTERS = (
    pages.router,
    classify.router,
    classify_batch.router,
    embed.router,
    attention.router,
    model.router,
    models_routes.router,
    health.router,
)
BESIDE_SECONDS: Final = 60
"""Longest start of an extension's `beside`."""

_PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
_EXPOSED_HEADERS = ("X-Request-ID", "Retry-After", "Content-Location", "traceresponse")


def image_store_of(settings: Settings, metrics: Metrics, clock: Callable[[], float]) -> ImageStore:
    """Return the image store of VIT_RECENT_URL: in memory, or an extension's.

    Raises:
        SettingsError: the configured store is not usable.
    """
    url = settings.recent_url.get_secret_value()
    if url == MEMORY:
        return MemoryImageStore(
            ttl=settings.recent_ttl,
            max_bytes=settings.recent_bytes,
            clock=clock,
            on_evicted=metrics.recent_evicted_age.observe,
        )
    scheme = url.partition("://")[0]
    extension = extensions_by_scheme()[scheme]
    with naming(extension, "stores"):
        store = extension.stores[scheme](settings, metrics, clock)
        if not isinstance(store, ImageStore):
            raise TypeError(f"{store!r} is not a `service.web.image_stores.ImageStore`")
        return store


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
        metrics: metrics in which the engines' owner counts batches.
        lifecycle: shared with the server that decides when to stop.
        on_engine_change: called on the event loop after each change of a model's state.
        image_store: store shared with other processes; by default, the store of VIT_RECENT_URL.
        clock: monotonic clock in seconds.
    """
    images = image_store or image_store_of(settings, metrics, clock)
    decoders = Decoders(settings, on_restart=metrics.decoder_restarts.inc)
    service = Service(
        models,
        settings,
        metrics,
        Limiter(settings.queue_size),
        ByteBudget(max(RECEIVING_BYTES // settings.workers, settings.max_request_bytes), clock),
        images,
        lifecycle or Lifecycle(),
        Lanes(settings, models, lambda: decoders.processes, clock),
        decoders,
        clock=clock,
    )
    app = Application(_lifespan)
    app.state.service = service
    app.state.guard = KeyGuard(settings.api_keys, settings.key_max_requests, metrics)
    app.state.on_models_changed = [partial(_publish_models, service)]
    parts = with_added_routes(_core_routes(settings), app)
    app.set_routes([route for part in parts for route in part.routes])
    app.state.rules = PathRules(parts)
    app.state.on_models_changed.append(on_engine_change)
    _watch(metrics, service)
    outermost = _surrounded(app, service)
    app.state.count = outermost.count
    return outermost


def _core_routes(settings: Settings) -> Routes:
    public = pages.PUBLIC | {"/healthz", "/readyz"}
    return Routes(
        [route for router in _ROUTERS for route in router.routes],
        public=public | {"/metrics"} if settings.metrics_public else public,
        probes=_PROBES,
        admin=models_routes.ADMIN,
    )


def _watch(metrics: Metrics, service: Service) -> None:
    """Connect the gauges with the objects that they describe."""
    models = service.models
    limiter = service.limiter
    metrics.watch(
        Sources(
            statuses=models.statuses,
            recent=service.images.usage,
            slots=lambda: (limiter.in_use, limiter.capacity),
            models=models.describe,
            results=lambda: models.results,
            reloads=models.reloads,
            recent_ttl=service.settings.recent_ttl,
        )
    )
    for code in problems.codes():
        metrics.rejected.labels(code)  # a rate needs a series at 0 before the first refusal


def _surrounded(app: Application, service: Service) -> RequestContextMiddleware:
    """Return the application inside its middleware; see `service.web.middleware`."""
    state = app.state
    settings = service.settings
    layers: ASGIApp = app
    if settings.api_keys:
        layers = ApiKeyMiddleware(layers, state.guard, state.rules, settings)
    layers = OriginMiddleware(layers, settings)
    pace = RefusalPace(service.clock)
    layers = ProblemMiddleware(layers, service.metrics, pace, state.rules)
    if settings.cors_origins:
        exact, pattern = split_origins(settings.cors_origins)
        layers = CORSMiddleware(
            layers,
            allow_origins=exact,
            allow_origin_regex=pattern,
            allow_methods=["GET", "HEAD", "POST", "PUT", "DELETE"],
            allow_headers=["*"],  # the key protects the service, not a list of headers
            allow_private_network=True,  # of the allowed origins
            expose_headers=_EXPOSED_HEADERS,
        )
    core = layers
    for extension in extensions():
        if extension.around is not None:
            with naming(extension, "around"):
                layers = extension.around(layers, app)
                if not callable(layers):
                    raise TypeError(f"{layers!r} is not an ASGI application")
    if layers is not core:  # answer errors of the extensions' middleware, too
        layers = ProblemMiddleware(layers, service.metrics, pace, state.rules)
    endpoints = {endpoint.path for endpoint in app.routes}
    prefixes = Prefixes(settings.root_path, endpoints)
    return RequestContextMiddleware(
        layers,
        service.metrics,
        endpoints,
        service.lifecycle,
        service.byte_budget,
        prefixes,
        state.rules.probes,
        clock=service.clock,
    )


def _publish_models(service: Service) -> None:
    """Publish the served models as metrics."""
    infos = [
        replica.info
        for model in service.models.served.values()
        for replica in model.current.engine.engines
        if replica.info is not None
    ]
    service.metrics.set_models(infos, __version__)


@asynccontextmanager
async def _lifespan(app: Application) -> AsyncIterator[None]:
    """Start the models and the extensions; at the end, close the shared objects."""
    service = app.state.service
    async with AsyncExitStack() as contexts:
        for extension in extensions():
            if extension.beside is not None:
                await contexts.enter_async_context(_beside(extension, extension.beside, app))
        service.models.start(partial(_models_changed, app))
        yield
    await service.models.close()
    service.lanes.close()
    service.decoders.close()
    await service.images.close()


@asynccontextmanager
async def _beside(
    extension: Extension,
    open_context: Callable[[Application], AbstractAsyncContextManager[None]],
    app: Application,
) -> AsyncIterator[None]:
    """Open the context of an extension's `beside`; log an error at its end.

    A start that takes too long ends the process, even if it blocks the event loop.

    Raises:
        ExtensionError: the start of the context failed.
    """
    timer = threading.Timer(BESIDE_SECONDS, _end_blocked, (extension,))
    timer.daemon = True
    timer.start()
    try:
        with naming(extension, "beside"):
            context = open_context(app)
            await context.__aenter__()
    finally:
        timer.cancel()
    try:
        yield
    finally:  # also if another extension has failed to start
        try:
            await context.__aexit__(None, None, None)
        except Exception:
            logger.exception("the extension %r: the end of `beside` failed", extension.name)


def _end_blocked(extension: Extension) -> NoReturn:
    logger.critical(
        "the extension %r: `beside` has not started within %d s: "
        "move slow work to a task or a thread, or uninstall it",
        extension.name,
        BESIDE_SECONDS,
    )
    exit_now(1)


def _models_changed(app: Application) -> None:
    for listener in app.state.on_models_changed:
        try:
            listener()
        except Exception:  # an extension's function must not end the change of a model
            logger.exception("a function of `on_models_changed` failed")


def log_model(status: EngineStatus, info: ModelInfo) -> None:
    """Log the description of the served model."""
    named = (__version__, info.name, info.source, info.content)
    computed = (info.device, info.dtype, info.backend, status.compiled)
    logger.info(
        "vitserve %s: %s from %s (content %s) on %s in %s, %s, compile: %s", *named, *computed
    )
