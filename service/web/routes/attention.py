"""GET and POST /attention: a map of where the model looked, as a picture, JSON or a NumPy file."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from model.images.heatmap import COLORMAPS, MAX_SIZE, default_view, encode_png
from model.images.preprocess import ModelInput, Region
from model.images.sheet import draw_maps
from model.label_texts import labels_of_request, with_labels
from model.outputs import (
    CLASS_SPECIFIC,
    MAX_CLASSES,
    METHODS,
    AttentionMap,
    Outputs,
    RequestedOutputs,
)
from model.parameters import parse_maps
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter, NotFound
from service.web.admitted import AdmittedRequest, admit
from service.web.gather import all_of
from service.web.picture import decode_file, decode_photo, infer_pixels
from service.web.routes.asked import Asked
from service.web.routes.endpoint import (
    BINARY,
    ONE_PICTURE,
    Absent,
    Endpoint,
    ModelName,
    npy_response,
    problems,
)
from service.web.service import Model, model_of, service_of
from vitserve.documents import MAPS, AttentionDocument, RegionDocument, significant

router = APIRouter(tags=["attention"], route_class=Endpoint)

_LOOK: Final = {"overlay", "view", "alpha", "colormap", "size", "smooth", "caption"}
"""Parameters of a drawing."""

_HEAD = r"^(mean|max|[0-9]{1,4})$"

_ANSWERS: dict[int | str, dict[str, object]] = {
    200: {
        "model": AttentionDocument | list[AttentionDocument],
        "content": {
            "image/png": {"schema": BINARY},
            "application/x-npy": {"schema": BINARY},
        },
        "description": "The map in the asked-for format",
    }
}


class AttentionQuery(BaseModel, frozen=True):
    """The query of both endpoints; None is what was not sent."""

    model: ModelName = None
    method: Annotated[
        str | Absent,
        Field(
            description=f"default `{METHODS[0]}`, or `cls` with a layer or head",
            json_schema_extra={"enum": list(METHODS)},
        ),
    ] = None
    class_: Annotated[
        str | Absent,
        Field(
            alias="class",
            description=f"whose map: an index or a label, or at most {MAX_CLASSES} with commas between; default "
            f"the best class; for {', '.join(sorted(CLASS_SPECIFIC))}",
        ),
    ] = None
    labels: Annotated[
        str | Absent,
        Field(
            description="for models with a text tower: what `class` names, as on /classify; `relevance` alone"
        ),
    ] = None
    layer: Annotated[
        int | Absent, Field(description="`cls`: default the last; negatives count from the end")
    ] = None
    head: Annotated[
        str | Absent,
        Field(
            description="`cls`: `mean` (default), `max`, or a head's number",
            json_schema_extra={"pattern": _HEAD},
        ),
    ] = None
    format: Literal["png", "json", "npy"] = "png"
    overlay: Annotated[bool | Absent, Field(description="PNG: over a picture; default true")] = None
    view: Annotated[
        Literal["input", "photo"] | Absent,
        Field(
            description="PNG: over what the model saw, or over the whole photo, the unseen part dimmed; default "
            "`photo` for models whose input has less than 128 pixels, else `input`"
        ),
    ] = None
    alpha: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Absent,
        Field(description="PNG: opacity of the map where it is highest; default 0.7"),
    ] = None
    colormap: Annotated[
        str | Absent, Field(description="PNG", json_schema_extra={"enum": list(COLORMAPS)})
    ] = None
    size: Annotated[
        Annotated[int, Field(ge=1, le=MAX_SIZE)] | Absent,
        Field(description="PNG: longer side in pixels"),
    ] = None
    smooth: Annotated[
        bool | Absent, Field(description="PNG: no steps between patches; default true")
    ] = None
    caption: Annotated[
        bool | Absent,
        Field(description="PNG: class, score, method and colours in words below; default true"),
    ] = None


class StoredPictureQuery(AttentionQuery):
    """The query of GET /attention."""

    id: Annotated[str, Field(description="from the answer of /classify")]
    view: Annotated[
        Literal["input"] | Absent,
        Field(description="PNG: over what the model saw; the photo itself is not kept"),
    ] = None


@router.get(
    "/attention", response_class=Response, responses=_ANSWERS | problems(404, 422, 503, 504)
)
async def attention_of_kept_picture(
    request: Request, query: Annotated[StoredPictureQuery, Query()]
) -> Response:
    """Draw the map of a picture that was classified before and is still stored."""
    service = service_of(request)
    model = await model_of(request, query.model)
    requests = _requests(query, model.info)
    with model.generation.request():  # another one may take over while the picture comes
        picture = await service.kept(query.id, model)
        if picture is None:
            raise NotFound(
                "no picture of this id is kept for this model: it is unknown, expired or pushed out"
            )
        async with admit(request, model) as admitted:
            await admitted.take(1)
            explained = await _explain(admitted, requests, picture)
            return await _answer(admitted, query, explained, picture, query.id)


@router.post(
    "/attention",
    response_class=Response,
    openapi_extra=ONE_PICTURE,
    responses=_ANSWERS | problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def attention(request: Request, query: Annotated[AttentionQuery, Query()]) -> Response:
    """Draw the map of the picture in the body."""
    model = await model_of(request, query.model)
    asked = Asked(request, query, model, _requests)
    async with admit(request, model) as admitted:
        file = await asked.read(admitted)
        await admitted.take(1)
        query, requests, model = asked.query, asked.wanted, admitted.model
        decoded, turn = await decode_file(admitted, file)
        turn.leave()
        picture = decoded.picture
        explained = await _explain(admitted, requests, picture)
        admitted.service.metrics.count_image(
            model.info.name, explained[0] if model.info.config.num_classes else None
        )
        image_id = await admitted.service.keep(picture, model)
        view, photo = query.view or default_view(model.info.config.image_size), None
        if query.format == "png" and view == "photo" and query.overlay is not False:
            # Decoded a second time, so that no photo is in memory while its map is computed.
            photo = await decode_photo(admitted, file, picture.region, query.size)
        return await _answer(admitted, query, explained, picture, image_id, photo)


async def _explain(
    admitted: AdmittedRequest, requests: Sequence[RequestedOutputs], picture: ModelInput
) -> list[Outputs]:
    """Return the outputs for a picture that have its maps, in the order of the requests for them."""
    results = await all_of(
        infer_pixels(admitted, picture.pixels, requested) for requested in requests
    )
    return [result.outputs for result in results]


async def _answer(
    admitted: AdmittedRequest,
    query: AttentionQuery,
    explained: Sequence[Outputs],
    picture: ModelInput,
    image_id: str | None,
    photo: ModelInput | None = None,
) -> Response:
    """Return maps in the format of the query; PNG over the photo, if there is one, else over the
    picture.
    """
    maps = [outputs.map for outputs in explained if outputs.map is not None]
    # A map shows the caller's picture: no shared cache may keep it, and no browser may take it for
    # something else.
    headers = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
    if image_id is not None:
        headers["Content-Location"] = (
            f"{admitted.sender.prefix}/attention?id={image_id}{query_of(admitted)}"
        )
    labels = _labels(query, admitted.model.info) or admitted.model.info.labels
    if query.format == "json":
        region = region_document(picture.region)
        documents = [
            AttentionDocument(id=image_id, region=region, **map_fields(each, labels))
            for each in maps
        ]
        content = MAPS.dump_json(
            documents[0] if len(maps) == 1 else documents, exclude_none=True, by_alias=True
        )
        return Response(content, media_type="application/json", headers=headers)
    if query.format == "npy":
        values = np.stack([each.values for each in maps]).astype(np.float32)
        return npy_response(values[0] if len(maps) == 1 else values, headers)
    shown, covered = (picture.pixels, None) if photo is None else (photo.pixels, photo.region)
    draw = partial(_png, maps, labels, shown, covered, query)
    size = len(maps) * (query.size or max(shown.shape)) ** 2
    return Response(
        await admitted.on_thread(admitted.service.lanes.drawings, draw, size),
        media_type="image/png",
        headers=headers,
    )


def _png(
    maps: list[AttentionMap],
    labels: Sequence[str],
    shown: NDArray[np.uint8],
    region: Region | None,
    query: AttentionQuery,
) -> bytes:
    """Return the maps over a picture, of which they cover a region, with a caption each."""
    look = query.model_dump(include=_LOOK - {"view", "caption"}, exclude_none=True)
    captioned = None if query.caption is False else labels
    return encode_png(
        draw_maps(maps, captioned, picture=shown, region=region, max_width=MAX_SIZE, **look)
    )


def query_of(admitted: AdmittedRequest, model: Model | None = None) -> str:
    """Return what a path ends with that asks a model again, by default the request's; nothing for
    the default one.
    """
    chosen, default = (model or admitted.model).info.name, admitted.service.models.default.info
    return "" if default is not None and chosen == default.name else f"&model={chosen}"


def map_fields(attention: AttentionMap, labels: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `Attention` and `AttentionDocument` share, for a map."""
    request = attention.request
    return {
        "method": request.method,
        "class": request.class_index,
        "label": None if request.class_index is None else labels[request.class_index],
        "score": None if attention.score is None else significant(attention.score),
        "evidence": None if attention.evidence is None else significant(attention.evidence),
        "abstained": None if request.class_index is None else attention.abstained,
        "grid": attention.values.shape,
        "layer": request.layer,
        "head": request.head,
        "values": attention.values.astype(np.float64).round(7).tolist(),
        "kept_mass": significant(attention.kept_mass),
    }


def region_document(region: Region) -> RegionDocument:
    """Return a region as the wire has it, to a thousandth of a pixel."""
    x, y, width, height = (round(side, 3) for side in region)
    return RegionDocument(x=x, y=y, width=width, height=height)


def _requests(query: AttentionQuery, info: ModelInfo) -> list[RequestedOutputs]:
    """Return what makes the maps of a query; raises `InvalidParameter` or `InputError` if the query
    is not allowed.
    """
    selected, labels = query.model_dump(include={"method", "layer", "head"}), _labels(query, info)
    maps = parse_maps(
        with_labels(info.config, labels), labels or info.labels, classes=query.class_, **selected
    )
    if labels and maps[0].method != "relevance":
        raise InvalidParameter(f"labels does not apply to method {maps[0].method!r}")
    _check_drawing(query)
    return [RequestedOutputs(1, each, labels=labels) for each in maps]


def _labels(query: AttentionQuery, info: ModelInfo) -> tuple[str, ...]:
    """Return the labels of a query, none without; raises as `labels_of_request`."""
    return (
        () if query.labels is None else labels_of_request(query.labels, info.zero_shot, info.config)
    )


def _check_drawing(query: AttentionQuery) -> None:
    """Raise `InvalidParameter` if a parameter of drawing does not apply, or the colormap is
    unknown.
    """
    if query.format != "png":
        for name in sorted(query.model_dump(include=_LOOK, exclude_none=True)):
            raise InvalidParameter(f"{name} does not apply to format {query.format!r}")
    if query.colormap is not None and query.colormap not in COLORMAPS:
        raise InvalidParameter(
            f"colormap {query.colormap!r}: expected one of {', '.join(COLORMAPS)}"
        )
    for name in ("alpha", "view") if query.overlay is False else ():
        if getattr(query, name) is not None:
            raise InvalidParameter(f"{name} does not apply without overlay")
