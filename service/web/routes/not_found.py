"""The answer to an unknown path, which names the route that was probably meant."""

import re
from collections.abc import Collection
from typing import Final

from starlette.responses import RedirectResponse
from starlette.types import Receive, Scope, Send

from model.errors import nearest
from service.errors import NotFound
from service.web.middleware import request_context
from service.web.routes.endpoint import Endpoint

_MAX_COMPARED_CHARACTERS: Final = 100

_OTHER_NAMES: Final = {
    "predict": "/classify",
    "prediction": "/classify",
    "infer": "/classify",
    "inference": "/classify",
    "upload": "/classify",
    "batch": "/classify/batch",
    "explain": "/attention",
    "heatmap": "/attention",
    "features": "/embed",
    "health": "/healthz",
    "live": "/healthz",
    "livez": "/healthz",
    "ready": "/readyz",
    "classes": "/labels",
    "swagger": "/docs",
    "redoc": "/docs",
}
"""Our routes by their names in TorchServe, TensorFlow Serving, SageMaker and other servers."""


async def no_such_path(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a path without a route; raises `NotFound`.

    The bare prefix of a proxy redirects to the page, whose relative links need the final slash.
    """
    path = scope["path"]
    method = scope["method"]
    if path == "" and method in ("GET", "HEAD"):
        query = f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else ""
        redirect = RedirectResponse(f"{request_context(scope).prefix}/{query}", 308)
        await redirect(scope, receive, send)
        return
    methods: dict[str, set[str]] = {}
    for route in scope["app"].routes:
        if isinstance(route, Endpoint) and "." not in route.path:
            methods.setdefault(route.path_format, set()).update(route.allowed_methods)
    meant = _meant(path, methods)
    if not meant:
        raise NotFound(f"{path}: no such path; GET /docs lists all")
    if method not in methods[meant]:
        method = min(methods[meant])
    raise NotFound(f"{path}: no such path; did you mean {method} {meant}?")


def _meant(path: str, known: Collection[str]) -> str:
    """Return the path of the route that was probably meant, or an empty text.

    The unknown path may have a prefix, other letter case and extra slashes (`/api/v1/classify/`).
    It may be a route's name in another server, or similar to the path of a route.
    """
    parts = [part for part in re.split("[/:]", path[:_MAX_COMPARED_CHARACTERS].lower()) if part]
    for start in range(len(parts)):
        tail = "/".join(parts[start:])
        if f"/{tail}" in known:
            return f"/{tail}"
        if tail in _OTHER_NAMES:
            return _OTHER_NAMES[tail]
    return nearest("/" + "/".join(parts), known)
