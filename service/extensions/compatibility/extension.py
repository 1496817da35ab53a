"""Adds the routes of TorchServe and SageMaker: /ping, /predictions and /invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.extension import Extension, Routes

if TYPE_CHECKING:
    from service.web.routes.endpoint import Application


def _routes(_: Application) -> Routes:
    from service.extensions.compatibility.routes import PROBES, router

    return Routes(router.routes, public=PROBES, probes=PROBES)


EXTENSION = Extension(name="compatibility", routes=_routes)
