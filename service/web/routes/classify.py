"""POST /classify and POST /classify/batch."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ImageError
from model.images.region import Region
from model.prediction import AttentionMap, EmbeddingRequest, MapRequest, RequestedOutputs
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, ServiceError, UploadTooLarge
from service.web.awaiting import all_of, unless_disconnected
from service.web.decoders import Decoded
from service.web.documents import map_fields, ranked_predictions, region_document
from service.web.middleware import request_context
from service.web.openapi import ONE_PICTURE, SEVERAL_PICTURES, problems
from service.web.pipeline import Pipeline, pipeline_of
from service.web.problems import problem_of
from service.web.routes.endpoint import Endpoint
from service.web.upload import UploadedFile
from vitserve.documents import Attention, BatchClassification, Classification, FailedItem, Timings

router = APIRouter(tags=["classify"], route_class=Endpoint)

_DEFAULT_TOP_K = 5


class ClassifyQuery(BaseModel, frozen=True):
    """The query of both endpoints."""

    top_k: Annotated[
        int | None, Field(ge=1, description="classes to answer with; default the smaller of 5 and all")
    ] = None
    attention: Annotated[
        bool | Literal["relevance"] | None,
        Field(description="answer with the last layer's attention map, too, or with the relevance of the best class"),
        WithJsonSchema({"type": "string", "enum": ["false", "true", "0", "1", "relevance"]}),
    ] = None  # no default is documented: FastAPI would write one that is no string
    embedding: Annotated[bool, Field(description="answer with what the head reads, too")] = False


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
    classifier = _Classifier(pipeline, request, query)
    with pipeline.admit_upload(request) as upload:
        file = await pipeline.read_one(request, upload)
        content = await unless_disconnected(request.receive, classifier.classify(file))
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
    classifier = _Classifier(pipeline, request, query)
    with pipeline.admit_upload(request) as upload:
        files = await pipeline.read(request, upload, files=pipeline.settings.max_images_per_request)
        items = all_of(classifier.classify_item(file) for file in files)
        results = b",".join(await unless_disconnected(request.receive, items))
    return Response(b'{"results":[%b]}' % results, media_type="application/json")


class _Classifier:
    """Classifies the files of one request; raises `EngineUnavailable`, or `InvalidParameter` if `top_k` is too high."""

    def __init__(self, pipeline: Pipeline, request: Request, query: ClassifyQuery) -> None:
        self._pipeline = pipeline
        self._info: ModelInfo = pipeline.model()
        classes = self._info.config.num_classes
        if query.top_k is not None and query.top_k > classes:
            raise InvalidParameter(f"top_k {query.top_k}: the model has {classes} classes")
        found = None
        if query.attention:
            row = MapRequest.row(self._info.config.depth - 1)
            found = MapRequest("relevance") if query.attention == "relevance" else row
        self._requested = RequestedOutputs(
            query.top_k or min(_DEFAULT_TOP_K, classes),
            found,
            embedding=EmbeddingRequest() if query.embedding else None,
        )
        self._context = request_context(request.scope)
        self._deadline = pipeline.deadline(request)

    async def classify(self, file: UploadedFile) -> bytes:
        """Decode, compute and keep a picture, and return its answer as JSON; raises `ImageError` or `ServiceError`."""
        if isinstance(file, UploadTooLarge):
            raise file
        pipeline = self._pipeline
        decoded, result = await pipeline.classify(file, self._deadline, self._requested)
        image_id = await pipeline.pictures.put(decoded.picture)
        pipeline.metrics.images.inc()
        pipeline.metrics.top1_score.observe(float(result.outputs.scores[0]))
        # A document of many classes is large, and lives only until it is JSON: a batch has many such documents.
        render = partial(self._render, decoded, result, image_id)
        return await pipeline.lanes.documents.run_large(render, self._deadline, size=self._requested.top_k)

    def _render(self, decoded: Decoded, result: InferenceResult, image_id: str | None) -> bytes:
        outputs, region = result.outputs, decoded.picture.region
        return to_json(
            Classification(
                id=image_id,
                model=self._info.name,
                predictions=ranked_predictions(self._info.labels, outputs.indices, outputs.scores),
                attention=None if outputs.map is None else self._attention(outputs.map, image_id, region),
                embedding=None if outputs.embedding is None else outputs.embedding.tolist(),
                timings_ms=Timings(
                    decode=_milliseconds(decoded.seconds),
                    queue=_milliseconds(result.queue_seconds),
                    inference=_milliseconds(result.inference_seconds),
                    total=_milliseconds(self._pipeline.clock() - self._context.started),
                ),
                batch_size=result.batch_size,
            )
        )

    def _attention(self, found: AttentionMap, image_id: str | None, region: Region) -> Attention:
        url = _url(image_id, found.request.method)
        return Attention(url=url, region=region_document(region), **map_fields(found, self._info.labels))

    async def classify_item(self, file: UploadedFile) -> bytes:
        """Return the answer to one picture of a batch, or its error, as JSON."""
        try:
            return await self.classify(file)
        except (ImageError, ServiceError) as error:
            return failed_item(self._pipeline, self._context.request_id, error)


def failed_item(pipeline: Pipeline, request_id: str, error: Exception) -> bytes:
    """Return the error of one picture of a batch as JSON, and count it."""
    problem = problem_of(error)
    pipeline.metrics.rejected.labels(problem.code).inc()
    return to_json(FailedItem(error=problem.document(request_id)))


def to_json(document: BaseModel) -> bytes:
    """Return a document without what it has not."""
    return document.model_dump_json(exclude_none=True, by_alias=True).encode()


def _url(image_id: str | None, method: str) -> str | None:
    """Return where the same map of a kept picture is drawn."""
    return None if image_id is None else f"/attention?id={image_id}" + ("&method=cls" if method == "cls" else "")


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 2)
