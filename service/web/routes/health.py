"""Routes of monitoring: /healthz, /readyz, /metrics."""

from typing import Final, Literal

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from service.errors import InvalidParameter
from service.observe.metrics import CONTENT_TYPE
from service.web.admit import service_of
from service.web.routes.endpoint import Router
from service.web.routes.openapi import problems

_TEXT: Final = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

router = Router("operations")


class Status(BaseModel):
    """The answer of GET /healthz and GET /readyz."""

    status: Literal["ok", "ready"]


@router.get("/healthz", answer=Status, is_loose=True)
async def healthz(request: Request) -> Status:
    """Answer 200 while the process lives."""
    return Status(status="ok")


@router.get("/readyz", answer=Status, responses=problems(422, 503), is_loose=True)
async def readyz(request: Request) -> Status:
    """Answer 200 while the model is loaded and warm, and the service is not stopping."""
    if "model" in request.query_params:
        raise InvalidParameter(
            "model: /readyz is about the service; GET /models has the state of each model"
        )
    service_of(request).check_ready()
    return Status(status="ready")


@router.get("/metrics", responses=_TEXT, is_loose=True)
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    content = await service_of(request).metrics.scrapes.text()
    return Response(content, headers={"Content-Type": CONTENT_TYPE})
