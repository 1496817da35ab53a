"""POST /classify and POST /classify/batch, and what clients of TorchServe and of SageMaker's containers call instead.

https://pytorch.org/serve/inference_api.html
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model.errors import ImageError
from model.heads import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, EmbeddingRequest, RequestedOutputs, parse_maps
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, ServiceError
from service.web.decoders import Decoded
from service.web.inference_protocol.inference import find_model
from service.web.problems import problem_of
from service.web.request import AdmittedRequest, all_of, model_of, require_file, service_of
from service.web.routes.attention import map_fields, region_document
from service.web.routes.endpoint import ONE_PICTURE, SEVERAL_PICTURES, Absent, Endpoint, problems, to_json
from service.web.upload import UploadedFile
from vitserve.documents import (
    FIELD,
    Attention,
    BatchClassification,
    Classification,
    FailedItem,
    ranked,
    set_fields,
    significant,
)

router = APIRouter(tags=["classify"], route_class=Endpoint)
others = APIRouter(tags=["other servers"], route_class=Endpoint)

PUBLIC: Final = frozenset({"/ping"})
"""Paths that ask for no key: SageMaker and load balancers send none."""

_FIELDS: Final = (FIELD, "data", "body")
"""Names that TorchServe's clients give to the part with the picture."""

_PATH: Final = "/predictions/{name:path}"
_NAME: Final = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_LABELS: Final = {"name": "labels", "in": "query", "schema": {"type": "string"}}
_PREDICTION: Final = ONE_PICTURE | {"parameters": [_NAME, _LABELS]}
_REFUSALS: Final = problems(400, 404, 408, 413, 415, 422, 500, 503, 504)


class ClassifyQuery(BaseModel, frozen=True):
    """The query of both endpoints."""

    top_k: Annotated[
        Annotated[int, Field(ge=1)] | Absent,
        Field(description="classes to answer with; default the smaller of 5 and all"),
    ] = None
    attention: Annotated[
        bool | Literal["relevance"] | Absent,
        Field(description="answer with the last layer's attention map, too, or with the relevance of the best class"),
        WithJsonSchema({"type": "string", "enum": ["false", "true", "0", "1", "relevance"]}),
    ] = None  # FastAPI would document a default that is no string
    embedding: Annotated[bool, Field(description="answer with what the head reads, too")] = False
    labels: Annotated[
        str | Absent,
        Field(description="names to compare with, comma-separated or a JSON array; for models with a text tower"),
    ] = None


@router.post(
    "/classify",
    response_model=Classification,
    response_model_exclude_none=True,
    openapi_extra=ONE_PICTURE,
    responses=problems(400, 408, 413, 415, 422, 500, 503, 504),
)
async def classify(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify one picture: a multipart field `file`, or the raw body."""
    model = model_of(request)
    requested = _requested(query, model.info)
    async with service_of(request).admit(request, model) as admitted:
        picture = await admitted.read_picture()
        content = await _answer(admitted, requested, picture)
    return Response(content, media_type="application/json")


@router.post(
    "/classify/batch",
    response_model=BatchClassification,
    response_model_exclude_none=True,
    openapi_extra=SEVERAL_PICTURES,
    responses=problems(400, 408, 413, 415, 422, 503),
)
async def classify_batch(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify several pictures (multipart fields `file`); each gets its own answer or its own error."""
    model = model_of(request)
    requested = _requested(query, model.info)
    async with service_of(request).admit(request, model) as admitted:
        pictures = await admitted.read_pictures(admitted.service.settings.max_images_per_request)
        return await answer_each(admitted, pictures, partial(_answer, admitted, requested))


def _requested(query: ClassifyQuery, info: ModelInfo) -> RequestedOutputs:
    """Return what is asked of each picture; raises `InvalidParameter` or `InputError`."""
    config, labels = info.config, tuple[str, ...]()
    if query.labels is not None or not config.num_classes:
        labels = labels_of_request(query.labels, info.zero_shot, config)
        config = with_labels(config, labels)
    if query.top_k is not None and query.top_k > config.num_classes:
        compared = f"there are {len(labels)} labels" if labels else f"the model has {config.num_classes} classes"
        raise InvalidParameter(f"top_k {query.top_k}: {compared}")
    maps = []
    if query.attention:
        method = "relevance" if query.attention == "relevance" else "cls"
        maps = parse_maps(config, labels or info.labels, method=method)
    return RequestedOutputs(
        query.top_k or min(DEFAULT_TOP_K, config.num_classes),
        maps[0] if maps else None,
        embedding=EmbeddingRequest() if query.embedding else None,
        labels=labels,
        label_set=info.coverage is not None,
    )


async def _answer(admitted: AdmittedRequest, requested: RequestedOutputs, picture: bytearray) -> bytes:
    """Return a picture's `Classification` as JSON; the picture is put into the image store."""
    decoded, result = await admitted.classify(picture, requested)
    image_id = await admitted.service.images.put(decoded.picture)
    admitted.service.metrics.images.inc()
    admitted.service.metrics.observe_classes(result.outputs)

    def write() -> bytes:
        total = admitted.service.clock() - admitted.sender.started
        return msgspec.json.encode(_document(admitted.model.info, requested, decoded, result, image_id, total))

    # A document of many classes is large, and lives only until it is JSON: a batch has many such documents.
    return await admitted.write(write, size=requested.top_k)


def _document(
    info: ModelInfo,
    requested: RequestedOutputs,
    decoded: Decoded,
    result: InferenceResult,
    image_id: str | None,
    total: float,
) -> dict[str, object]:
    """Return the fields of `Classification` for a picture, `total` seconds after the request's head."""
    outputs, labels = result.outputs, requested.labels or info.labels
    attention = None
    if outputs.map is not None:
        # A map of a label of the request cannot be asked for again by the picture's id.
        of_labels = requested.labels and outputs.map.request.class_index is not None
        url = None if image_id is None or of_labels else _url(image_id, outputs.map.request.method)
        region = region_document(decoded.picture.region)
        attention = Attention(url=url, region=region, **map_fields(outputs.map, labels))
    timings = {
        "decode": _milliseconds(decoded.seconds),
        "queue": _milliseconds(result.queue_seconds),
        "inference": _milliseconds(result.inference_seconds),
        "total": _milliseconds(total),
    }
    fields = {
        "id": image_id,
        "model": info.name,
        "predictions": ranked(labels, outputs.indices.tolist(), outputs.scores.tolist()),
        **set_fields(labels, None if outputs.label_set is None else outputs.label_set.tolist()),
        "attention": None if attention is None else attention.model_dump(exclude_none=True, by_alias=True),
        "embedding": None if outputs.embedding is None else outputs.embedding.tolist(),
        "timings_ms": timings,
        "batch_size": result.batch_size,
    }
    return {name: value for name, value in fields.items() if value is not None}


async def answer_each(
    admitted: AdmittedRequest, pictures: Sequence[UploadedFile], answer: Callable[[bytearray], Awaitable[bytes]]
) -> Response:
    """Return for each picture of a batch what `answer` makes of it as JSON, or its problem."""

    async def item(picture: UploadedFile) -> bytes:
        try:
            return await answer(require_file(picture))
        except (ImageError, ServiceError) as error:
            problem = problem_of(error)
            admitted.service.metrics.rejected.labels(problem.code).inc()
            return to_json(FailedItem(error=problem.document(admitted.sender.request_id)))

    results = b",".join(await all_of(map(item, pictures)))
    return Response(b'{"results":[%b]}' % results, media_type="application/json")


def _url(image_id: str, method: str) -> str:
    """Return where the same map of a stored picture is drawn."""
    return f"/attention?id={image_id}" + ("&method=cls" if method == "cls" else "")


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)


class Health(BaseModel):
    """The answer of GET /ping."""

    status: Literal["Healthy"]


@others.get("/ping", response_model=Health, responses=problems(503))
async def ping(request: Request) -> Health:
    """Answer 200 when the model is ready, as /readyz."""
    service_of(request).check_ready()
    return Health(status="Healthy")


@others.post(
    "/invocations",
    response_model=Classification,
    response_model_exclude_none=True,
    openapi_extra=ONE_PICTURE,
    responses=problems(400, 408, 413, 415, 422, 500, 503, 504),
)
async def invocations(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify one picture, as POST /classify."""
    return await classify(request, query)


@others.post(
    "/predictions/{name:path}", response_model=dict[str, float], openapi_extra=_PREDICTION, responses=_REFUSALS
)
async def predictions(request: Request) -> Response:
    """Return the scores of the best classes by label, as TorchServe does. Of equal labels the best stays.

    With VIT_COVERAGE they are those in the set of labels: none where the model abstains.

    The picture is the body, or a multipart field `data`, `body` or `file`. `labels` is that of POST /classify.
    """
    path: str = request.path_params["name"]  # a model's name may have slashes, and a version may follow it
    name, _, version = (path, "", "") if path == model_of(request).info.name else path.rpartition("/")
    model = find_model(service_of(request), name or path, version.removesuffix(".0") if name else "")
    requested = _requested(ClassifyQuery(labels=request.query_params.get("labels")), model.info)
    names = requested.labels or model.info.labels
    async with service_of(request).admit(request, model) as admitted:
        picture = await admitted.read_picture(_FIELDS)
        _, result = await admitted.classify(picture, requested)
    outputs, metrics = result.outputs, admitted.service.metrics
    metrics.images.inc()
    metrics.count_abstained(outputs)
    count = None if outputs.label_set is None else len(outputs.label_set)  # they are the best ones
    by_label: dict[str, float] = {}
    for index, score in zip(outputs.indices[:count].tolist(), outputs.scores[:count].tolist(), strict=True):
        by_label.setdefault(names[index], significant(score))
    return JSONResponse(by_label)


@others.put(_PATH, response_model=dict[str, float], openapi_extra=_PREDICTION, responses=_REFUSALS)
async def predictions_by_put(request: Request) -> Response:
    """Answer as POST does: TorchServe's examples send the picture by `curl -T`, which is a PUT."""
    return await predictions(request)
