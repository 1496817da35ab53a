"""The application: routes, middleware, and one table from errors to answers.

Engines are handed in: nothing here imports a model or torch.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from model.errors import VitError
from service.engine.base import Engine, replicas
from service.engine.messages import EngineStatus, ModelInfo
from service.errors import (
    ClientDisconnected,
    InvalidParameter,
    MalformedRequest,
    MethodNotAllowed,
    NotFound,
    ServiceError,
)
from service.metrics.metrics import Metrics
from service.settings import Settings
from service.web.admission import Limiter
from service.web.image_store import ImageStore, MemoryImageStore
from service.web.lifecycle import Lifecycle
from service.web.middleware import PROBES, ApiKeyMiddleware, RequestContextMiddleware
from service.web.pipeline import Pipeline
from service.web.problems import MEDIA_TYPE, body, problem_of
from service.web.routes import attention, classify, operations
from service.web.shortcut import Shortcut

logger = logging.getLogger("vitserve")

VERSION = importlib.metadata.version("vitserve")

_ROUTERS = (classify.router, attention.router, operations.router)
_PUBLIC = frozenset({"/", "/docs", "/openapi.json", "/healthz", "/readyz"})


def create_app(
    settings: Settings,
    engine: Engine,
    metrics: Metrics,
    lifecycle: Lifecycle | None = None,
    on_engine_change: Callable[[], None] = lambda: None,
    places: Limiter | None = None,
    recent: ImageStore | None = None,
) -> ASGIApp:
    """The ASGI application around an engine.

    Args:
        settings: see `service.settings`.
        engine: started when the application starts, closed when it stops.
        metrics: the same that the engine's owner counts batches in.
        lifecycle: shared with the server that decides when to stop.
        on_engine_change: called on the event loop after each change of the engine's state.
        places: those that other processes count in too; by default this application's own.
        recent: pictures that other processes keep too; by default this application's own.
    """
    lifecycle = lifecycle or Lifecycle()
    places = places or Limiter(settings.queue_size)
    recent = recent or MemoryImageStore(ttl=settings.recent_ttl, max_bytes=settings.recent_bytes)
    threads = settings.decode_threads or -(-min(os.cpu_count() or 1, 16) // settings.workers)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    pipeline = Pipeline(settings, engine, metrics, places, recent, lifecycle, pool)

    def engine_changed() -> None:
        for replica in replicas(engine):
            if replica.info is not None:
                metrics.set_model(replica.info, VERSION)
        on_engine_change()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        engine.start(engine_changed)
        yield
        await engine.close()
        pool.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="vitserve",
        version=VERSION,
        description="Image classification with a Vision Transformer.",
        lifespan=lifespan,
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.pipeline = pipeline
    for router in _ROUTERS:
        app.include_router(router)
    app.add_exception_handler(ServiceError, _on_error)
    app.add_exception_handler(VitError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(Exception, _on_error)  # a defect of ours; raised again after its answer, and logged

    metrics.watch_engines(lambda: [replica.status for replica in replicas(engine)])
    metrics.watch_recent(recent.usage)

    public = _PUBLIC | {"/metrics"} if settings.metrics_public else _PUBLIC
    keys = [key.get_secret_value() for key in settings.api_keys]
    layers: ASGIApp = ApiKeyMiddleware(Shortcut(app, pipeline), keys, public, metrics)
    if settings.cors_origins:
        layers = CORSMiddleware(
            layers,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
            expose_headers=["X-Request-ID", "Retry-After", "Content-Location"],
        )
    endpoints = {route.path for router in _ROUTERS for route in router.routes if isinstance(route, Route)}
    return RequestContextMiddleware(layers, metrics, endpoints | {"/docs", "/openapi.json"}, lifecycle)


def log_model(status: EngineStatus, info: ModelInfo) -> None:
    """Log what is served, once it is."""
    logger.info(
        "vitserve %s: %s on %s in %s, %s, compile: %s",
        VERSION,
        info.name,
        info.device,
        info.dtype,
        info.backend,
        status.compiled,
    )


async def _on_error(request: Request, error: Exception) -> Response:
    """Every error of a route becomes a problem document."""
    if isinstance(error, ClientDisconnected):
        # Nobody is left to read it: the answer is never sent, and not counted as one.
        return _NoAnswer()
    translated = _translate(request, error)
    headers = {"Allow": _allowed(request)} if isinstance(translated, MethodNotAllowed) else {}
    problem = problem_of(translated)
    pipeline: Pipeline = request.app.state.pipeline
    if request.url.path not in PROBES:
        pipeline.metrics.rejected.labels(problem.code).inc()
    content = body(problem, request.scope["vit.request_id"])
    return Response(content, problem.status, headers | problem.headers(), MEDIA_TYPE)


def _translate(request: Request, error: Exception) -> Exception:
    """FastAPI's own errors as ours."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        name = first["loc"][-1]
        return InvalidParameter(f"{name}: {str(first['msg'])[:1].lower()}{str(first['msg'])[1:]}")
    if isinstance(error, HTTPException):
        if error.status_code == 404:
            return NotFound(f"{request.url.path}: no such path")
        if error.status_code == 405:
            return MethodNotAllowed(f"{request.method} {request.url.path}: no such method on this path")
        return MalformedRequest(str(error.detail))
    return error


def _allowed(request: Request) -> str:
    """The methods that the request's path has; each is a route of its own."""
    methods: set[str] = set()
    for route in (*request.app.routes, *(route for router in _ROUTERS for route in router.routes)):
        if isinstance(route, Route) and route.path == request.url.path:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


class _NoAnswer(Response):
    """Says nothing to a caller that went away."""

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        """Send nothing."""
