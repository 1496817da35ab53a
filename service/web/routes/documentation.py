"""GET /docs, the files that its page loads, and /openapi.json."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.web.routes.endpoint import Endpoint
from service.web.routes.static_files import asset, html_page

router = APIRouter(include_in_schema=False, route_class=Endpoint)

_STATIC = Path(__file__).parents[1] / "static"
_ASSETS = {
    "/docs/docs.js": _STATIC / "docs/docs.js",
    "/docs/swagger-ui-bundle.js": _STATIC / "swagger_ui/swagger-ui-bundle.js",
    "/docs/swagger-ui.css": _STATIC / "swagger_ui/swagger-ui.css",
}

PUBLIC = frozenset({"/docs", "/openapi.json", *_ASSETS})
"""Paths that are open even when keys are set."""

_docs = html_page(_STATIC / "docs/index.html", _ASSETS)


@router.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    return JSONResponse(request.app.openapi())


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """Describe the service for people."""
    return await _docs(request)


for _url, _path in _ASSETS.items():
    router.add_api_route(
        _url, asset(_path, "text/css" if _path.suffix == ".css" else "text/javascript"), methods=["GET", "HEAD"]
    )
