"""Answers that are files of the package: pages with a strict policy, and what these load from this host alone."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_UNCHANGED_FOR_A_YEAR = "public, max-age=31536000, immutable"


def html_page(path: Path, assets: Mapping[str, Path]) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers a page; the addresses of its `assets` carry their versions.

    Args:
        path: the page, whose addresses are relative and quoted.
        assets: paths of the service that the page may name, and their files.
    """

    @lru_cache
    def versioned() -> tuple[bytes, str]:
        def address(found: re.Match[str]) -> str:
            asset = assets.get(f"/{found[1]}")
            return found[0] if asset is None else f'"{found[1]}?v={_file(asset)[1]}"'

        content = re.sub(r'"([^"\s]+)"', address, path.read_text(encoding="utf-8")).encode()
        return content, _version(content)

    async def page(request: Request) -> Response:
        headers = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
        return _cached(request, *versioned(), "text/html", "no-cache", headers)

    return page


def asset(path: Path, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    """Return the function that answers a file of a page."""

    async def answer(request: Request) -> Response:
        content, version = _file(path)
        # The page names the version that it wants; during an update another may be here, which must not be kept as it.
        current = request.query_params.get("v") == version
        return _cached(request, content, version, media_type, _UNCHANGED_FOR_A_YEAR if current else "no-cache", {})

    return answer


@lru_cache
def _file(path: Path) -> tuple[bytes, str]:
    """Return a file's content and its version, a hash of the content."""
    content = path.read_bytes()
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
