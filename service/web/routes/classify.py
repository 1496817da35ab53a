"""POST /classify and POST /classify/batch."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ImageError
from model.prediction import MapRequest
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, ServiceError, UploadTooLarge
from service.schemas import (
    Attention,
    BatchClassification,
    Classification,
    FailedItem,
    Prediction,
    ProblemDocument,
    Timings,
    rounded,
    significant,
)
from service.web.pipeline import Deadline, Pipeline, unless_disconnected
from service.web.problems import problem_of
from service.web.routes.dependencies import PipelineDependency
from service.web.routes.documentation import ONE_PICTURE, SEVERAL_PICTURES, problems
from service.web.upload import Picture

router = APIRouter(tags=["classify"])

TopK = Annotated[int | None, Query(ge=1, description="classes to answer with; default the smaller of 5 and all")]
WithAttention = Annotated[bool, Query(description="answer with the last layer's attention map, too")]

_DEFAULT_TOP_K = 5


@router.post(
    "/classify",
    response_model=Classification,
    openapi_extra=ONE_PICTURE,
    responses=problems(400, 401, 408, 413, 415, 422, 500, 503, 504),
)
async def classify(
    request: Request, pipeline: PipelineDependency, top_k: TopK = None, attention: WithAttention = False
) -> Response:
    """Classify one picture: a multipart field `file`, or the raw body."""
    return await classify_one(request, pipeline, top_k, attention)


async def classify_one(request: Request, pipeline: Pipeline, top_k: int | None, attention: bool) -> Response:
    """The answer to POST /classify; `service.web.shortcut` asks for it, too.

    Args:
        request: its body is not read yet.
        pipeline: see there.
        top_k: positive, or None for the default.
        attention: whether the answer has a map.

    Raises:
        ServiceError, VitError: the answer is a problem.
    """
    question = _Question(pipeline, request, top_k, attention)
    with pipeline.admit() as permit:
        picture = await pipeline.read_one(request, permit)
        answer = await unless_disconnected(request.receive, question.answer(picture))
    return _json(answer)


@router.post(
    "/classify/batch",
    response_model=BatchClassification,
    openapi_extra=SEVERAL_PICTURES,
    responses=problems(400, 401, 408, 413, 415, 422, 503),
)
async def classify_batch(
    request: Request, pipeline: PipelineDependency, top_k: TopK = None, attention: WithAttention = False
) -> Response:
    """Classify several pictures (multipart fields `file`); each gets its own answer or its own error."""
    question = _Question(pipeline, request, top_k, attention)
    with pipeline.admit() as permit:
        pictures = await pipeline.read(request, permit, files=pipeline.settings.max_images_per_request)
        answers = asyncio.gather(*(question.answer_or_problem(picture) for picture in pictures))
        results = await unless_disconnected(request.receive, answers)
    return _json(BatchClassification(results=results))


def _json(answer: Classification | BatchClassification) -> Response:
    return Response(answer.model_dump_json(exclude_none=True), media_type="application/json")


class _Question:
    """What one request asks of each of its pictures.

    Raises:
        InvalidParameter: `top_k` is above the number of classes.
        EngineUnavailable: no model is ready.
    """

    def __init__(self, pipeline: Pipeline, request: Request, top_k: int | None, attention: bool) -> None:
        self._pipeline = pipeline
        self._info: ModelInfo = pipeline.model()
        classes = self._info.config.num_classes
        if top_k is not None and top_k > classes:
            raise InvalidParameter(f"top_k {top_k}: the model has {classes} classes")
        self._top_k = top_k or min(_DEFAULT_TOP_K, classes)
        self._map = MapRequest(self._info.config.depth - 1) if attention else None
        self._deadline: Deadline = pipeline.deadline(request)
        self._started: float = request.scope["vit.started"]
        self._request_id: str = request.scope["vit.request_id"]

    async def answer(self, picture: Picture) -> Classification:
        """Decode, infer, keep, answer."""
        if isinstance(picture, UploadTooLarge):
            raise picture
        decoded = await self._pipeline.decode(picture, self._deadline)
        result = await self._pipeline.infer(decoded.pixels, self._deadline, top_k=self._top_k, map_request=self._map)
        image_id = self._pipeline.recent.put(decoded.pixels)
        predictions = [
            Prediction(label=self._info.labels[index], index=index, score=significant(score))
            for index, score in zip(result.indices.tolist(), result.scores.tolist(), strict=True)
        ]
        self._pipeline.metrics.images.inc()
        self._pipeline.metrics.top1_score.observe(predictions[0].score)
        return Classification(
            id=image_id,
            model=self._info.name,
            predictions=predictions,
            attention=_attention(result, image_id),
            timings_ms=Timings(
                decode=round(1000 * decoded.seconds, 2),
                queue=round(1000 * result.queue_seconds, 2),
                inference=round(1000 * result.inference_seconds, 2),
                total=round(1000 * (time.monotonic() - self._started), 2),
            ),
            batch_size=result.batch_size,
        )

    async def answer_or_problem(self, picture: Picture) -> Classification | FailedItem:
        """The same, with the picture's own error in place of an answer."""
        try:
            return await self.answer(picture)
        except (ImageError, ServiceError) as error:
            problem = problem_of(error)
            self._pipeline.metrics.rejected.labels(problem.code).inc()
            return FailedItem(error=ProblemDocument(**problem.document(self._request_id)))


def _attention(result: InferenceResult, image_id: str | None) -> Attention | None:
    if result.map is None:
        return None
    rows, columns = result.map.values.shape
    return Attention(
        url=None if image_id is None else f"/attention?id={image_id}",
        grid=(rows, columns),
        layer=result.map.layer,
        head=result.map.head,
        values=rounded(result.map.values),
        kept_mass=significant(result.map.kept_mass),
    )
