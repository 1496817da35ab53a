"""GET /docs, the files that its page loads, and /openapi.json. Nothing comes from another host."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.web.routes.endpoint import Endpoint

router = APIRouter(include_in_schema=False, route_class=Endpoint)

_STATIC = Path(__file__).parents[1] / "static"
_SCRIPT, _STYLE = "text/javascript", "text/css"
_ASSETS = {
    "/docs/docs.js": (_STATIC / "docs/docs.js", _SCRIPT),
    "/docs/swagger-ui-bundle.js": (_STATIC / "swagger_ui/swagger-ui-bundle.js", _SCRIPT),
    "/docs/swagger-ui.css": (_STATIC / "swagger_ui/swagger-ui.css", _STYLE),
}

PUBLIC = frozenset({"/docs", "/openapi.json", *_ASSETS})
"""Paths that are open even when keys are set."""

# Swagger UI's own pictures are `data:` addresses in its style sheet; an answer that is a picture is shown from `blob:`.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_UNCHANGED_FOR_A_YEAR = "public, max-age=31536000, immutable"


@router.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    return JSONResponse(request.app.openapi())


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """Describe the service for people."""
    headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    return _cached(request, *_page(), "text/html", "no-cache", headers)


def _asset(path: Path, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def asset(request: Request) -> Response:
        content, version = _file(path)
        # The page names the version that it wants; during an update another may be here, which must not be kept as it.
        current = request.query_params.get("v") == version
        return _cached(request, content, version, media_type, _UNCHANGED_FOR_A_YEAR if current else "no-cache", {})

    return asset


for _url, _source in _ASSETS.items():
    router.add_api_route(_url, _asset(*_source), methods=["GET", "HEAD"])


@lru_cache
def _file(path: Path) -> tuple[bytes, str]:
    """Return a file's content and its version, a hash of the content."""
    content = path.read_bytes()
    return content, _version(content)


@lru_cache
def _page() -> tuple[bytes, str]:
    """Return the page and its version; the addresses of its files carry theirs."""
    page = (_STATIC / "docs/index.html").read_text(encoding="utf-8")
    content = re.sub(
        r'"(docs/[^"]+)"', lambda found: f'"{found[1]}?v={_file(_ASSETS[f"/{found[1]}"][0])[1]}"', page
    ).encode()
    return content, _version(content)


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _cached(
    request: Request, content: bytes, version: str, media_type: str, cache_control: str, headers: dict[str, str]
) -> Response:
    """Return the content, or 304 to a caller that has it already."""
    tag = f'"{version}"'
    headers |= {"ETag": tag, "Cache-Control": cache_control, "X-Content-Type-Options": "nosniff"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)
