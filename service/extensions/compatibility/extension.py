"""Adds the routes of TorchServe and SageMaker: /ping, /predictions and /invocations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from service.extension import Extension, Routes

if TYPE_CHECKING:
    from service.web.routes.endpoint import Application


def _routes(_: Application) -> Routes:
    from service.extensions.compatibility.routes import PUBLIC, router

    return Routes(router.routes, PUBLIC)


EXTENSION = Extension(name="compatibility", routes=_routes)
