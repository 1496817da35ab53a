"""What every route asks for: the pipeline that `service.app` built."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends
from starlette.requests import Request

from service.pipeline import Pipeline


def _pipeline(request: Request) -> Pipeline:
    return cast(Pipeline, request.app.state.pipeline)


PipelineDependency = Annotated[Pipeline, Depends(_pipeline)]
