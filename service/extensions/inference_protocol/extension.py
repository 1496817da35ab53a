"""Adds the Open Inference Protocol: /v2 over HTTP, and gRPC on VIT_GRPC_PORT."""

from __future__ import annotations

from contextlib import AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from service.extension import Extension, Routes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from service.settings import Settings
    from service.web.routes.endpoint import Application


def _prepared(settings: Settings) -> AbstractContextManager[Settings]:
    from service.extensions.inference_protocol.grpc_port import grpc_port_kept

    return grpc_port_kept(settings)


def _routes(_: Application) -> Routes:
    from service.extensions.inference_protocol import GRPC_PROBES
    from service.extensions.inference_protocol.routes import (
        ADMIN,
        PROBES,
        problem_answer,
        router,
    )

    return Routes(
        router.routes,
        public=PROBES,
        probes=PROBES | GRPC_PROBES,
        admin=ADMIN,
        problem_answers={"/v2": problem_answer},
    )


@asynccontextmanager
async def _beside(app: Application) -> AsyncIterator[None]:
    from service.extensions.inference_protocol.settings import InferenceProtocolSettings
    from service.settings import settings_of

    service = app.state.service
    port = settings_of(service.settings, InferenceProtocolSettings).grpc_port
    if port is None:
        yield
        return
    from service.extensions.inference_protocol.grpc.server import serving  # needs the extra `grpc`

    async with serving(service, app.state.guard, app.state.count, port):
        yield


EXTENSION = Extension(
    name="inference_protocol",
    settings="service.extensions.inference_protocol.settings:InferenceProtocolSettings",
    notes={"admin_key": "/v2/repository"},
    prepared=_prepared,
    routes=_routes,
    beside=_beside,
)
