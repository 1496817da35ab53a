"""GET /docs and /openapi.json."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.web.routes.endpoint import Endpoint

router = APIRouter(include_in_schema=False, route_class=Endpoint)


@router.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    return JSONResponse(request.app.openapi())


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """Describe the service for people."""
    url = request.scope.get("root_path", "").rstrip("/") + "/openapi.json"
    return get_swagger_ui_html(openapi_url=url, title=f"{request.app.title} - Swagger UI")
