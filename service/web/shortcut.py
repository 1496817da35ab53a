"""POST /classify past the framework's layers, which would cost a request as much of the event loop's time as all of
ours.

    middleware -> Shortcut --- POST /classify, plain query ---> routes.classify.classify_one
                              |                                             ^
                              +--- anything else ---> FastAPI -> routes ----+

Nothing is decided here: what is not asked in the simplest form goes to the framework, which validates it, and both
ways lead to the same function.
"""

from __future__ import annotations

import re

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from model.errors import VitError
from service.errors import ClientDisconnected, ServiceError
from service.web.middleware import refuse
from service.web.pipeline import Pipeline
from service.web.routes.classify import classify_one

_PLAIN = re.compile(rb"(?:top_k=([1-9][0-9]{0,5}))?(?:(?:^|(?<=[0-9])&)attention=(true|false))?")
"""The query string as most callers write it, if at all."""


class Shortcut:
    """Takes the requests that are nearly all there are; see the module.

    Args:
        app: takes all others.
        pipeline: as the routes have it.
    """

    def __init__(self, app: ASGIApp, pipeline: Pipeline) -> None:
        self._app = app
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entry."""
        asked = None
        if scope["type"] == "http" and scope["path"] == "/classify" and scope["method"] == "POST":
            asked = _PLAIN.fullmatch(scope["query_string"])
        if asked is None:
            await self._app(scope, receive, send)
            return
        top_k = int(asked[1]) if asked[1] else None
        try:
            answer = await classify_one(Request(scope, receive), self._pipeline, top_k, asked[2] == b"true")
        except ClientDisconnected:
            return  # nobody is left to read it
        except (ServiceError, VitError) as error:
            await refuse(scope, send, error, self._pipeline.metrics)
            return
        await answer(scope, receive, send)
