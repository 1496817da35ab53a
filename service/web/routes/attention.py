"""GET and POST /attention: a map of where the model looked, as a picture, JSON or a NumPy file."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, Depends, Query
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from model.images.heatmap import COLORMAPS, render_heatmap
from model.prediction import AttentionMap, Head, MapRequest
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter, NotFound
from service.schemas import AttentionDocument, attention_document
from service.web.pipeline import Deadline, Pipeline, unless_disconnected
from service.web.routes.dependencies import PipelineDependency
from service.web.routes.documentation import ONE_PICTURE, problems

router = APIRouter(tags=["attention"])

METHODS = ("cls",)
"""Methods offered."""

MAX_SIZE = 2048
"""Longer side of a heat map, in pixels."""


@dataclass(frozen=True, slots=True)
class Options:
    """The query, as sent: None is what was not."""

    method: str
    layer: int | None
    head: str | None
    class_: str | None
    format: Literal["png", "json", "npy"]
    overlay: bool | None
    alpha: float | None
    colormap: str | None
    size: int | None


async def _options(
    method: Annotated[str, Query(description=f"one of: {', '.join(METHODS)}")] = "cls",
    layer: Annotated[int | None, Query(description="default the last; negatives count from the end")] = None,
    head: Annotated[str | None, Query(description="`mean` (default), `max`, or a head's number")] = None,
    class_: Annotated[str | None, Query(alias="class", description="for method `relevance` only")] = None,
    format: Annotated[Literal["png", "json", "npy"], Query()] = "png",  # noqa: A002
    overlay: Annotated[bool | None, Query(description="PNG: over what the model saw; default true")] = None,
    alpha: Annotated[float | None, Query(ge=0, le=1, description="PNG: weight of the map over the picture")] = None,
    colormap: Annotated[str | None, Query(description=f"PNG: {', '.join(COLORMAPS)}")] = None,
    size: Annotated[int | None, Query(ge=1, le=MAX_SIZE, description="PNG: longer side in pixels")] = None,
) -> Options:
    return Options(method, layer, head, class_, format, overlay, alpha, colormap, size)


OptionsDependency = Annotated[Options, Depends(_options)]

_MEDIA: dict[int | str, dict[str, object]] = {
    200: {
        "content": {
            "image/png": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": AttentionDocument.model_json_schema()},
            "application/x-npy": {"schema": {"type": "string", "format": "binary"}},
        },
        "description": "The map in the asked-for format",
    }
}


@router.get("/attention", response_class=Response, responses=_MEDIA | problems(401, 404, 422, 503, 504))
async def kept_picture(
    request: Request,
    pipeline: PipelineDependency,
    options: OptionsDependency,
    image_id: Annotated[str, Query(alias="id", description="from the answer of /classify")],
) -> Response:
    """A map of a picture that was classified before and is still kept."""
    wanted = _Wanted(pipeline.model(), options)
    pixels = pipeline.recent.get(image_id)
    if pixels is None:
        raise NotFound("no picture of this id is kept: it is unknown, expired or pushed out")
    with pipeline.admit():
        deadline = pipeline.deadline(request)
        return await unless_disconnected(request.receive, _answer(pipeline, wanted, pixels, deadline, image_id))


@router.post(
    "/attention",
    response_class=Response,
    openapi_extra=ONE_PICTURE,
    responses=_MEDIA | problems(400, 401, 408, 413, 415, 422, 500, 503, 504),
)
async def new_picture(request: Request, pipeline: PipelineDependency, options: OptionsDependency) -> Response:
    """A map of the picture in the body."""
    wanted = _Wanted(pipeline.model(), options)
    with pipeline.admit() as permit:
        picture = await pipeline.read_one(request, permit)
        deadline = pipeline.deadline(request)
        return await unless_disconnected(request.receive, _decode_and_answer(pipeline, wanted, picture, deadline))


async def _decode_and_answer(pipeline: Pipeline, wanted: _Wanted, picture: bytearray, deadline: Deadline) -> Response:
    decoded = await pipeline.decode(picture, deadline)
    return await _answer(pipeline, wanted, decoded.pixels, deadline, None)


async def _answer(
    pipeline: Pipeline, wanted: _Wanted, pixels: NDArray[np.uint8], deadline: Deadline, image_id: str | None
) -> Response:
    """Run the model on the picture and render its map; keeps the picture unless it is kept already."""
    result = await pipeline.infer(pixels, deadline, top_k=1, map_request=wanted.map_request)
    found = result.map
    assert found is not None, "the engine answers a map when it is asked for one"
    if image_id is None:
        pipeline.metrics.images.inc()
        pipeline.metrics.top1_score.observe(float(result.scores[0]))
        image_id = pipeline.recent.put(pixels)
    headers = {} if image_id is None else {"Content-Location": f"/attention?id={image_id}"}
    options = wanted.options
    if options.format == "json":
        document = attention_document(found, image_id=image_id, method=options.method)
        return Response(document.model_dump_json(exclude_none=True), media_type="application/json", headers=headers)
    if options.format == "npy":
        return Response(_npy(found), media_type="application/x-npy", headers=headers)
    png = await pipeline.in_thread(lambda: _render(found, pixels, options))
    return Response(png, media_type="image/png", headers=headers)


def _render(found: AttentionMap, pixels: NDArray[np.uint8], options: Options) -> bytes:
    picture = pixels if pixels.shape[-1] == 3 else np.repeat(pixels[..., :1], 3, axis=-1)
    given = {"colormap": options.colormap, "alpha": options.alpha, "size": options.size}
    return render_heatmap(
        found.values,
        picture=None if options.overlay is False else picture,
        **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
    )


def _npy(found: AttentionMap) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, found.values.astype(np.float32), allow_pickle=False)
    return buffer.getvalue()


class _Wanted:
    """The options, checked against the model.

    Raises:
        InvalidParameter: a value out of range, or a parameter that does not apply.
    """

    def __init__(self, info: ModelInfo, options: Options) -> None:
        self.options = options
        if options.method not in METHODS:
            raise InvalidParameter(f"method {options.method!r}: this service offers {', '.join(METHODS)}")
        if options.class_ is not None:
            raise InvalidParameter(f"class does not apply to method {options.method!r}")
        if options.format != "png":
            for name in ("overlay", "alpha", "colormap", "size"):
                if getattr(options, name) is not None:
                    raise InvalidParameter(f"{name} does not apply to format {options.format!r}")
        if options.colormap is not None and options.colormap not in COLORMAPS:
            raise InvalidParameter(f"colormap {options.colormap!r}: expected one of {', '.join(COLORMAPS)}")
        if options.overlay is False and options.alpha is not None:
            raise InvalidParameter("alpha does not apply without overlay")
        self.map_request = MapRequest(
            parse_layer(options.layer, info.config.depth), parse_head(options.head, info.config.heads)
        )


def parse_layer(layer: int | None, depth: int) -> int:
    """A layer's number from 0; None is the last, negatives count from the end.

    Raises:
        InvalidParameter: the model has no such layer.
    """
    if layer is None:
        return depth - 1
    if not -depth <= layer < depth:
        raise InvalidParameter(f"layer {layer}: the model has layers {-depth} ... {depth - 1}")
    return layer % depth


def parse_head(head: str | None, heads: int) -> Head:
    """How heads are combined, or one head's number.

    Raises:
        InvalidParameter: the model has no such head.
    """
    if head is None or head == "mean":
        return "mean"
    if head == "max":
        return "max"
    if not head.isascii() or not head.isdecimal() or len(head) > 4 or int(head) >= heads:
        raise InvalidParameter(f"head {head[:20]!r}: expected mean, max, or 0 ... {heads - 1}")
    return int(head)
