"""GET / and GET /docs: pages with a strict policy, the files that they load from this host alone, and /openapi.json."""

from __future__ import annotations

import gzip
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.web.routes.endpoint import Endpoint

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_UNCHANGED_FOR_A_YEAR: Final = "public, max-age=31536000, immutable"
_MEDIA_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}
_GZIP: Final = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;\s*q=(?!0(?:\.0*)?\s*(?:$|,)))", re.IGNORECASE)
"""A header `Accept-Encoding` that allows gzip."""

_PAGE: Final = Path(__file__).parents[1] / "page"
_STATIC: Final = Path(__file__).parents[1] / "static"
_PAGE_FILES: Final = {
    f"/page/{path.relative_to(_PAGE).as_posix()}": path
    for path in sorted(_PAGE.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}
_DOCS_FILES: Final = {
    "/docs/docs.js": _STATIC / "docs/docs.js",
    "/docs/swagger-ui-bundle.js": _STATIC / "swagger_ui/swagger-ui-bundle.js.gz",
    "/docs/swagger-ui.css": _STATIC / "swagger_ui/swagger-ui.css.gz",
}

PUBLIC: Final = frozenset({"/", "/docs", "/openapi.json", *_PAGE_FILES, *_DOCS_FILES})
"""Paths that are open even when keys are set: the page asks for the key."""

page = APIRouter(include_in_schema=False, route_class=Endpoint)
documentation = APIRouter(include_in_schema=False, route_class=Endpoint)


@documentation.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    return JSONResponse(request.app.openapi())


def _html_page(path: Path, files: Mapping[str, Path]) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a page, whose addresses are relative and quoted; those of its `files` get versions."""

    @lru_cache
    def versioned() -> tuple[bytes, str]:
        def address(match: re.Match[str]) -> str:
            file = files.get(f"/{match[1]}")
            return match[0] if file is None else f'"{match[1]}?v={_file(file)[1]}"'

        content = re.sub(r'"([^"\s]+)"', address, path.read_text(encoding="utf-8")).encode()
        return content, _version(content)

    async def html_page(request: Request) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
        return _unless_cached(request, *versioned(), "text/html", headers)

    return html_page


def _static_file(path: Path, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of a file that a page loads."""

    async def static_file(request: Request) -> Response:
        content, version = _file(path)
        # A page names the version that it loads. During an update another may be here, which must not be kept as that.
        is_named = request.query_params.get("v") == version
        headers = {"Cache-Control": _UNCHANGED_FOR_A_YEAR if is_named else "no-cache"}
        if path.suffix == ".gz":
            headers["Vary"] = "Accept-Encoding"
            if _GZIP.search(request.headers.get("accept-encoding", "")):
                headers["Content-Encoding"] = "gzip"
                version += "-gzip"
            else:
                content = _decompressed(path)
        return _unless_cached(request, content, version, media_type, headers)

    return static_file


@lru_cache
def _file(path: Path) -> tuple[bytes, str]:
    """Return a file's content and its version, a hash of the content."""
    content = path.read_bytes()
    return content, _version(content)


@lru_cache
def _decompressed(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def _version(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _unless_cached(
    request: Request, content: bytes, version: str, media_type: str, headers: dict[str, str]
) -> Response:
    """Return the content, or 304 to a caller that has this version."""
    tag = f'"{version}"'
    headers |= {"ETag": tag, "X-Content-Type-Options": "nosniff"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=media_type)


for _router, _url, _html, _files in (
    (page, "/", _PAGE / "index.html", _PAGE_FILES),
    (documentation, "/docs", _STATIC / "docs/index.html", _DOCS_FILES),
):
    _router.add_api_route(_url, _html_page(_html, _files), methods=["GET", "HEAD"])
    for _url, _path in _files.items():
        _media_type = _MEDIA_TYPES[Path(_url).suffix]
        _router.add_api_route(_url, _static_file(_path, _media_type), methods=["GET", "HEAD"])
