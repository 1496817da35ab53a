"""GET /docs and /openapi.json, and the OpenAPI fragments that several routes share."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from service.schemas import FIELD, ProblemDocument
from service.web.problems import MEDIA_TYPE
from service.web.routes.endpoint import Endpoint

router = APIRouter(include_in_schema=False, route_class=Endpoint)

BINARY = {"type": "string", "format": "binary"}


def _body(file: dict[str, Any], **raw: Any) -> dict[str, Any]:
    """Return the description of a body: a form with the field `file`, or one of the media types `raw`."""
    form = {"schema": {"type": "object", "required": [FIELD], "properties": {FIELD: file}}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": form, **raw}}}


ONE_PICTURE = _body(BINARY, **{kind: {"schema": BINARY} for kind in ("image/*", "application/octet-stream")})
SEVERAL_PICTURES = _body({"type": "array", "items": BINARY})


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a route's error answers."""
    content = {MEDIA_TYPE: {"schema": ProblemDocument.model_json_schema()}}
    return {status: {"description": "Problem details (RFC 9457)", "content": content} for status in statuses}


@router.api_route("/openapi.json", methods=["GET", "HEAD"])
async def openapi(request: Request) -> Response:
    """Describe the service for machines."""
    return JSONResponse(request.app.openapi())


@router.api_route("/docs", methods=["GET", "HEAD"])
async def docs(request: Request) -> Response:
    """Describe the service for people."""
    url = request.scope.get("root_path", "").rstrip("/") + "/openapi.json"
    return get_swagger_ui_html(openapi_url=url, title=f"{request.app.title} - Swagger UI")
