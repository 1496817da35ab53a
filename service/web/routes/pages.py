"""GET / and GET /docs: pages with a strict policy, the files that they load from this host alone,
and /openapi.json.

Browsers ask for a file again each time, and are answered with 304 while it is the same.
"""

import gzip
import hashlib
import re
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.web.middleware import request_context
from service.web.routes.endpoint import PageEndpoint

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MEDIA_TYPES: Final = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".jpg": "image/jpeg",
    ".svg": "image/svg+xml",
}

_PAGE: Final = Path(__file__).parents[1] / "page"
_STATIC: Final = Path(__file__).parents[1] / "static"
_FILES: Final = {
    "/": _PAGE / "index.html",
    "/docs": _STATIC / "docs/index.html",
    "/docs/docs.js": _STATIC / "docs/docs.js",
    "/docs/swagger-ui-bundle.js": _STATIC / "swagger_ui/swagger-ui-bundle.js.gz",
    "/docs/swagger-ui.css": _STATIC / "swagger_ui/swagger-ui.css.gz",
} | {
    f"/page/{path.relative_to(_PAGE).as_posix()}": path
    for path in sorted(_PAGE.rglob("*"))
    if path.suffix in _MEDIA_TYPES and path.name != "index.html"
}

_TAKES_GZIP: Final = r"gzip(?!\s*;\s*q=0(\.0*)?\s*(,|$))"

PUBLIC: Final = frozenset({"/openapi.json", *_FILES})
"""Paths that are open even when keys are set: the page asks for the key."""

router = APIRouter(include_in_schema=False, route_class=PageEndpoint)


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    prefix = request_context(request.scope).prefix
    servers = {"servers": [{"url": prefix}]} if prefix else {}
    return JSONResponse(request.app.openapi() | servers)


async def file(request: Request) -> Response:
    """Return a file of the page or of the documentation, which may be stored compressed."""
    path = _FILES[request.scope["path"]]
    media_type = _MEDIA_TYPES[(path.with_suffix("") if path.suffix == ".gz" else path).suffix]
    is_packed = path.suffix == ".gz"
    unpack = is_packed and not re.search(
        _TAKES_GZIP, request.headers.get("accept-encoding", ""), re.IGNORECASE
    )
    content, tag = _content(path, unpack)
    headers = {"Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff", "ETag": tag}
    if media_type == "text/html":
        headers |= {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
    if is_packed:
        headers |= {"Vary": "Accept-Encoding"} | ({} if unpack else {"Content-Encoding": "gzip"})
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


@lru_cache
def _content(path: Path, unpack: bool) -> tuple[bytes, str]:
    """Return a file's content, or what is compressed in it, and its tag, a quoted hash of it."""
    content = gzip.decompress(path.read_bytes()) if unpack else path.read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'


for _url in _FILES:
    router.add_api_route(_url, file, methods=["GET"])
