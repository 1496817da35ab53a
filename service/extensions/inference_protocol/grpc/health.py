"""The service `grpc.health.v1.Health`: `/readyz` and `/v2/models/NAME/ready` over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from service.errors import NotFound, Unavailable, UnknownModel
from service.extensions.inference_protocol import GRPC_HEALTH_SERVICE, GRPC_SERVICE
from service.web.service import Service

WATCH_SECONDS: Final = 0.5
"""Interval at which a watch checks the status; orchestrators probe as often."""

REQUEST: Final = "grpc.health.v1.HealthCheckRequest"
RESPONSE: Final = "grpc.health.v1.HealthCheckResponse"

SERVING: Final = "SERVING"

# Names that mean the whole service.
_WHOLE: Final = frozenset({"", GRPC_SERVICE, GRPC_HEALTH_SERVICE})


def status_of(service: Service, name: str) -> str:
    """Return the status of the service, or of a named model; raises `UnknownModel`."""
    try:
        service.check_ready()
        if name not in _WHOLE:
            service.models.require_ready(service.models.key(name))
    except UnknownModel:
        raise
    except (NotFound, Unavailable):
        return "NOT_SERVING"
    return SERVING


async def watch(service: Service, name: str, send: Callable[[str], Awaitable[None]]) -> None:
    """Send the status whenever it changes, until the service stops."""
    before = ""
    while True:
        try:
            status = status_of(service, name)
        except UnknownModel:
            status = "SERVICE_UNKNOWN"
        if status != before:
            await send(status)
            before = status
        if service.lifecycle.draining:
            return
        await asyncio.sleep(WATCH_SECONDS)
