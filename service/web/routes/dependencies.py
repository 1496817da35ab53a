"""What every route asks for: the pipeline that `service.web.app` built."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from service.web.pipeline import Pipeline


async def _pipeline(request: Request) -> Pipeline:
    # Not a plain function: FastAPI would run it on a thread of its own, two switches for each request.
    return cast(Pipeline, request.app.state.pipeline)


PipelineDependency = Annotated[Pipeline, Depends(_pipeline)]
