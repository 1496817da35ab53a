"""GET and POST /attention: maps of where the model looked, in PNG, JSON or NumPy files."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from model.images.heatmap import COLORMAPS, MAX_SIZE, default_view, encode_png
from model.images.preprocess import ModelInput
from model.images.sheet import draw_maps
from model.label_texts import labels_of_request, with_labels
from model.methods import is_class_specific, methods
from model.outputs import AttentionMap, Outputs, RequestedOutputs
from model.parameters import MAX_CLASSES, parse_maps
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter, NotFound
from service.web.admit import AdmittedRequest, admit, model_of, service_of, use_named_model
from service.web.body import check_early, read_picture
from service.web.gather import all_of
from service.web.picture import decode_file, decode_photo, infer_pixels, keep, kept_picture
from service.web.query import Absent, ModelName
from service.web.routes.endpoint import Router
from service.web.routes.openapi import BINARY, ONE_PICTURE, problems
from service.web.routes.shared_answers import (
    map_fields,
    model_parameter,
    npy_response,
    region_document,
)
from vitserve.documents import MAPS, AttentionDocument

router = Router("attention")

_DRAWING: Final = {"overlay", "view", "alpha", "colormap", "size", "smooth", "caption"}
"""Parameters of a drawing."""

_HEAD = r"^(mean|max|[0-9]{1,4})$"

_ANSWERS: dict[int, dict[str, object]] = {
    200: {
        "model": AttentionDocument | list[AttentionDocument],
        "content": {
            "image/png": {"schema": BINARY},
            "application/x-npy": {"schema": BINARY},
        },
        "description": "The map in the requested format",
    }
}


class AttentionQuery(BaseModel, frozen=True):
    """The query of both routes; None is the value of a parameter that was not sent."""

    model: ModelName = None
    method: Annotated[
        str | Absent,
        Field(
            description=f"default `{next(iter(methods()))}`, or `cls` with a layer or head",
            json_schema_extra={"enum": list(methods())},
        ),
    ] = None
    class_: Annotated[
        str | Absent,
        Field(
            alias="class",
            description="index or label of the explained class, or up to "
            f"{MAX_CLASSES} comma-separated ones; default the best class; for the methods "
            + ", ".join(sorted(filter(is_class_specific, methods()))),
        ),
    ] = None
    labels: Annotated[
        str | Absent,
        Field(
            description="labels that `class` names, as for /classify; for models with a text "
            "tower and the method `relevance`"
        ),
    ] = None
    layer: Annotated[
        int | Absent,
        Field(description="`cls`: number of the layer, negative from the end; default the last"),
    ] = None
    head: Annotated[
        str | Absent,
        Field(
            description="`cls`: `mean` (default), `max`, or the number of an attention head",
            json_schema_extra={"pattern": _HEAD},
        ),
    ] = None
    format: Literal["png", "json", "npy"] = "png"
    overlay: Annotated[
        bool | Absent, Field(description="PNG: draw over a picture; default true")
    ] = None
    view: Annotated[
        Literal["input", "photo"] | Absent,
        Field(
            description="PNG: draw over the part that the model saw (`input`), or over the whole "
            "photo with the rest dimmed (`photo`); default `photo` for models with inputs below "
            "128 pixels, else `input`"
        ),
    ] = None
    alpha: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Absent,
        Field(description="PNG: highest opacity of the map; default 0.7"),
    ] = None
    colormap: Annotated[
        str | Absent, Field(description="PNG: colours", json_schema_extra={"enum": list(COLORMAPS)})
    ] = None
    size: Annotated[
        Annotated[int, Field(ge=1, le=MAX_SIZE)] | Absent,
        Field(description="PNG: longer side in pixels"),
    ] = None
    smooth: Annotated[
        bool | Absent, Field(description="PNG: smooth the steps between patches; default true")
    ] = None
    caption: Annotated[
        bool | Absent,
        Field(description="PNG: add class, score, method and colours in words; default true"),
    ] = None

    def requested(self, info: ModelInfo) -> list[RequestedOutputs]:
        """Return the outputs requested of a model, for each class of the query.

        Raises:
            InvalidParameter, InputError: the model does not support the query, or a parameter does
                not apply.
        """
        labels = self.labels_of(info)
        maps = parse_maps(
            with_labels(info.config, labels),
            labels or info.labels,
            classes=self.class_,
            **self.model_dump(include={"method", "layer", "head"}),
        )
        if labels and maps[0].method != "relevance":
            raise InvalidParameter(f"labels does not apply to method {maps[0].method!r}")
        self._check_drawing()
        return [RequestedOutputs(1, map_request, labels=labels) for map_request in maps]

    def labels_of(self, info: ModelInfo) -> tuple[str, ...]:
        """Return the labels of the query, if it has any; raises as `labels_of_request`."""
        if self.labels is None:
            return ()
        return labels_of_request(self.labels, info.zero_shot, info.config)

    def _check_drawing(self) -> None:
        """Raise `InvalidParameter` if a parameter of the drawing is wrong or does not apply."""
        if self.format != "png":
            names = self.model_dump(include=_DRAWING, exclude_none=True)
            if names:
                raise InvalidParameter(f"{min(names)} does not apply to format {self.format!r}")
        if self.colormap is not None and self.colormap not in COLORMAPS:
            raise InvalidParameter(
                f"colormap {self.colormap!r}: expected one of {', '.join(COLORMAPS)}"
            )
        if self.overlay is False:
            for name in ("alpha", "view"):
                if getattr(self, name) is not None:
                    raise InvalidParameter(f"{name} does not apply without overlay")


class StoredPictureQuery(AttentionQuery):
    """The query of GET /attention."""

    id: Annotated[str, Field(description="from the answer of /classify")]
    view: Annotated[
        Literal["input", "photo"] | Absent,
        Field(
            description="PNG: draw over the part that the model saw; the photo is not kept",
            json_schema_extra={"enum": ["input"]},
        ),
    ] = None

    @field_validator("view")
    @classmethod
    def _is_kept(cls, view: str | None) -> str | None:
        if view != "photo":
            return view
        raise PydanticCustomError(
            "kept", "only the model's input is kept, not the photo; POST /attention draws over it"
        )


class _Explained(NamedTuple):
    """A picture with its maps.

    Attributes:
        picture: the picture as the model sees it.
        outputs: the outputs of each requested map.
        image_id: the id of the kept picture, or None if it is not kept.
        photo: the photo that the picture comes from, if the maps are drawn over it.
    """

    picture: ModelInput
    outputs: list[Outputs]
    image_id: str | None
    photo: ModelInput | None = None


@router.get("/attention", responses=_ANSWERS | problems(404, 422, 503, 504))
async def attention_of_kept_picture(request: Request, query: StoredPictureQuery) -> Response:
    """Draw the map of a picture that was classified before and is still stored."""
    service = service_of(request)
    model = await model_of(request, query.model)
    requests = query.requested(model.info)
    picture = await kept_picture(service, query.id, model)
    if picture is None:
        raise NotFound(
            "no picture of this id is kept for this model: it is unknown, expired or pushed out"
        )
    async with admit(request, model) as admitted:
        await admitted.take_slots(1)
        outputs = await _explain(admitted, requests, picture)
        return await _answer(admitted, query, _Explained(picture, outputs, query.id))


@router.post(
    "/attention",
    body=ONE_PICTURE,
    responses=_ANSWERS | problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def attention(request: Request, query: AttentionQuery) -> Response:
    """Draw the map of the picture in the body."""
    model = await model_of(request, query.model)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        file, query = await read_picture(request, admitted, query)
        await use_named_model(request, admitted, query.model)
        requests = query.requested(admitted.model.info)
        await admitted.take_slots(1)
        decoded, turn = await decode_file(admitted, file)
        turn.leave()
        picture = decoded.picture
        outputs = await _explain(admitted, requests, picture)
        info = admitted.model.info
        admitted.service.metrics.count_image(
            info.name, outputs[0] if info.config.num_classes else None
        )
        image_id = await keep(admitted, picture)
        photo = None
        if _is_over_photo(query, info):
            # The file is decoded again, so that no photo is in memory while its map is computed.
            photo = await decode_photo(admitted, file, picture.region, query.size)
        return await _answer(admitted, query, _Explained(picture, outputs, image_id, photo))


def _is_over_photo(query: AttentionQuery, info: ModelInfo) -> bool:
    """Return whether the maps are drawn over the whole photo."""
    view = query.view or default_view(info.config.image_size)
    return query.format == "png" and view == "photo" and query.overlay is not False


async def _explain(
    admitted: AdmittedRequest, requests: Sequence[RequestedOutputs], picture: ModelInput
) -> list[Outputs]:
    """Return the outputs of a picture for each requested map."""
    results = await all_of(
        infer_pixels(admitted, picture.pixels, requested) for requested in requests
    )
    return [result.outputs for result in results]


async def _answer(
    admitted: AdmittedRequest, query: AttentionQuery, explained: _Explained
) -> Response:
    """Answer with the maps of a picture, in the format of the query."""
    maps = [outputs.map for outputs in explained.outputs if outputs.map is not None]
    info = admitted.model.info
    labels = query.labels_of(info) or info.labels
    # A map shows the caller's picture: a shared cache must not keep it, and a browser must not
    # take it for something else.
    headers = {"Cache-Control": "private", "X-Content-Type-Options": "nosniff"}
    if explained.image_id is not None:
        link = f"/attention?id={explained.image_id}{model_parameter(admitted, admitted.model)}"
        headers["Content-Location"] = admitted.sender.prefix + link
    if query.format == "json":
        return _json(maps, labels, explained, headers)
    if query.format == "npy":
        values = np.stack([attention.values for attention in maps]).astype(np.float32)
        return npy_response(values[0] if len(maps) == 1 else values, headers)
    shown = explained.photo or explained.picture
    draw = partial(_png, maps, labels, explained, query)
    size = len(maps) * (query.size or max(shown.pixels.shape)) ** 2
    content = await admitted.on_thread(admitted.service.lanes.drawings, draw, size)
    return Response(content, media_type="image/png", headers=headers)


def _json(
    maps: Sequence[AttentionMap],
    labels: Sequence[str],
    explained: _Explained,
    headers: Mapping[str, str],
) -> Response:
    """Answer with one document, or with a list of documents for several maps."""
    region = region_document(explained.picture.region)
    documents = [
        AttentionDocument(id=explained.image_id, region=region, **map_fields(attention, labels))
        for attention in maps
    ]
    content = MAPS.dump_json(
        documents[0] if len(documents) == 1 else documents, exclude_none=True, by_alias=True
    )
    return Response(content, media_type="application/json", headers=headers)


def _png(
    maps: list[AttentionMap], labels: Sequence[str], explained: _Explained, query: AttentionQuery
) -> bytes:
    """Return the maps over the photo or the picture, with a caption each."""
    shown = explained.picture.pixels
    region = None
    if explained.photo is not None:
        shown = explained.photo.pixels
        region = explained.photo.region
    options = query.model_dump(include=_DRAWING - {"view", "caption"}, exclude_none=True)
    sheet = draw_maps(
        maps,
        None if query.caption is False else labels,
        picture=shown,
        region=region,
        max_width=MAX_SIZE,
        **options,
    )
    return encode_png(sheet)
