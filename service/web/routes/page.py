"""GET /: the page that classifies pictures and shows where the model looked, and the files that it loads."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from service.web.routes.endpoint import Endpoint
from service.web.routes.static_files import asset, html_page

router = APIRouter(include_in_schema=False, route_class=Endpoint)

_FOLDER = Path(__file__).parents[1] / "page"
_MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".jpg": "image/jpeg", ".svg": "image/svg+xml"}
_ASSETS = {
    f"/page/{path.relative_to(_FOLDER).as_posix()}": path
    for path in sorted(_FOLDER.rglob("*"))
    if path.suffix in _MEDIA_TYPES
}

PUBLIC = frozenset({"/", *_ASSETS})
"""Paths that are open even when keys are set: the page asks for the key."""

_page = html_page(_FOLDER / "index.html", _ASSETS)


@router.api_route("/", methods=["GET", "HEAD"])
async def front_page(request: Request) -> Response:
    """Show the page."""
    return await _page(request)


for _url, _path in _ASSETS.items():
    router.add_api_route(_url, asset(_path, _MEDIA_TYPES[_path.suffix]), methods=["GET", "HEAD"])
