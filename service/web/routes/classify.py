"""POST /classify and POST /classify/batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ImageError
from model.outputs import DEFAULT_TOP_K, EmbeddingRequest, Method, RequestedOutputs, parse_maps
from model.heads import labels_of_request, with_labels
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, ServiceError, UploadTooLarge
from service.web.decoders import Decoded
from service.web.middleware import request_context
from service.web.pipeline import Pipeline, pipeline_of
from service.web.problems import problem_of
from service.web.routes.attention import map_fields, region_document
from service.web.routes.endpoint import ONE_PICTURE, SEVERAL_PICTURES, Endpoint, problems
from service.web.upload import UploadedFile
from vitserve.documents import (
    Attention,
    BatchClassification,
    Classification,
    FailedItem,
    set_fields,
    significant,
)

router = APIRouter(tags=["classify"], route_class=Endpoint)


class ClassifyQuery(BaseModel, frozen=True):
    """The query of both endpoints."""

    top_k: Annotated[
        int | None, Field(ge=1, description="classes to answer with; default the smaller of 5 and all")
    ] = None
    attention: Annotated[
        bool | Literal["relevance"] | None,
        Field(description="answer with the last layer's attention map, too, or with the relevance of the best class"),
        WithJsonSchema({"type": "string", "enum": ["false", "true", "0", "1", "relevance"]}),
    ] = None  # FastAPI would document a default that is no string
    embedding: Annotated[bool, Field(description="answer with what the head reads, too")] = False
    labels: Annotated[
        str | None,
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
    pipeline = pipeline_of(request)
    content = await pipeline.answer_picture(request, _Classifier(pipeline, request, query).classify)
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
    pipeline = pipeline_of(request)
    return await answer_batch(pipeline, request, _Classifier(pipeline, request, query).classify)


class _Classifier:
    """Classifies the files of one request.

    Raises:
        EngineUnavailable: no engine answers.
        InvalidParameter: `top_k` is too high.
        InputError: the model has no such map.
    """

    def __init__(self, pipeline: Pipeline, request: Request, query: ClassifyQuery) -> None:
        self._pipeline = pipeline
        self._info: ModelInfo = pipeline.model()
        method: Method | None = None
        if query.attention:
            method = "relevance" if query.attention == "relevance" else "cls"
        labels: tuple[str, ...] = ()
        config = self._info.config
        if query.labels is not None or not config.num_classes:
            labels = labels_of_request(query.labels, self._info.zero_shot, config)
            config = with_labels(config, labels)
        self._labels = labels or self._info.labels
        if query.top_k is not None and query.top_k > config.num_classes:
            compared = f"there are {len(labels)} labels" if labels else f"the model has {config.num_classes} classes"
            raise InvalidParameter(f"top_k {query.top_k}: {compared}")
        map_request = None if method is None else parse_maps(config, self._labels, method=method)[0]
        embedding = EmbeddingRequest() if query.embedding else None
        top_k = query.top_k or min(DEFAULT_TOP_K, config.num_classes)
        label_set = self._info.coverage is not None
        self._requested = RequestedOutputs(top_k, map_request, embedding=embedding, labels=labels, label_set=label_set)
        self._context = request_context(request.scope)
        self._deadline = pipeline.deadline(request)

    async def classify(self, file: bytearray) -> bytes:
        """Decode, compute and keep a picture, and return its answer as JSON; raises `ImageError` or `ServiceError`."""
        pipeline = self._pipeline
        decoded, result = await pipeline.compute(file, self._deadline, self._requested)
        image_id = await pipeline.pictures.put(decoded.picture)
        pipeline.metrics.images.inc()
        pipeline.metrics.observe_classes(result.outputs)
        # A document of many classes is large, and lives only until it is JSON: a batch has many such documents.
        render = partial(self._render, decoded, result, image_id)
        return await pipeline.pools.documents.run_large(render, self._deadline, size=self._requested.top_k)

    def _render(self, decoded: Decoded, result: InferenceResult, image_id: str | None) -> bytes:
        """Return a `Classification` as JSON; to make the model itself would take four times as long."""
        outputs = result.outputs
        pairs = zip(outputs.indices.tolist(), outputs.scores.tolist(), strict=True)
        document: dict[str, Any] = {} if image_id is None else {"id": image_id}
        document["model"] = self._info.name
        document["predictions"] = [
            {"label": self._labels[index], "index": index, "score": significant(score)} for index, score in pairs
        ]
        document |= set_fields(self._labels, None if outputs.label_set is None else outputs.label_set.tolist())
        if outputs.map is not None:
            of_labels = bool(self._requested.labels) and outputs.map.request.class_index is not None
            # A map of a label of the request cannot be asked for again by the picture's id.
            url = None if of_labels else _url(image_id, outputs.map.request.method)
            region = region_document(decoded.picture.region)
            attention = Attention(url=url, region=region, **map_fields(outputs.map, self._labels))
            document["attention"] = attention.model_dump(exclude_none=True, by_alias=True)
        if outputs.embedding is not None:
            document["embedding"] = outputs.embedding.tolist()
        document["timings_ms"] = {
            "decode": _milliseconds(decoded.seconds),
            "queue": _milliseconds(result.queue_seconds),
            "inference": _milliseconds(result.inference_seconds),
            "total": _milliseconds(self._pipeline.clock() - self._context.started),
        }
        document["batch_size"] = result.batch_size
        return msgspec.json.encode(document)


async def answer_batch(
    pipeline: Pipeline, request: Request, answer: Callable[[bytearray], Awaitable[bytes]]
) -> Response:
    """Return for each picture of a batch what `answer` makes of it, or its error, as JSON."""
    request_id = request_context(request.scope).request_id

    async def item(_: int, file: UploadedFile) -> bytes:
        try:
            if isinstance(file, UploadTooLarge):
                raise file
            return await answer(file)
        except (ImageError, ServiceError) as error:
            problem = problem_of(error)
            pipeline.metrics.rejected.labels(problem.code).inc()
            return to_json(FailedItem(error=problem.document(request_id)))

    results = b",".join(await pipeline.answer_pictures(request, item))
    return Response(b'{"results":[%b]}' % results, media_type="application/json")


def to_json(document: BaseModel) -> bytes:
    """Return a document as JSON, without the fields that are None."""
    return document.model_dump_json(exclude_none=True, by_alias=True).encode()


def _url(image_id: str | None, method: str) -> str | None:
    """Return where the same map of a kept picture is drawn."""
    return None if image_id is None else f"/attention?id={image_id}" + ("&method=cls" if method == "cls" else "")


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
