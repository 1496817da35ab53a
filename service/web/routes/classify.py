"""POST /classify: the classes of one picture, by one model or by several."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from model.label_texts import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, EmbeddingRequest, MapRequest, RequestedOutputs
from model.parameters import parse_maps
from service.class_fields import class_fields
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter
from service.web.admit import AdmittedRequest, admit, model_of, use_named_model
from service.web.body import check_early, read_picture
from service.web.decoders import Decoded
from service.web.gather import all_of
from service.web.image_stores import new_image_id
from service.web.picture import infer_file, keep
from service.web.query import Absent, ModelQuery
from service.web.routes.endpoint import Router
from service.web.routes.openapi import ONE_PICTURE, problems
from service.web.routes.several_models import (
    ALL_MODELS,
    Classified,
    Pass,
    SeveralModels,
    find_models,
    infer_by_group,
)
from service.web.routes.shared_answers import (
    map_fields,
    model_parameter,
    problem_item,
    region_document,
)
from vitserve.documents import Attention, Classification, Classifications, Timings

router = Router("classify")


class ClassifyQuery(ModelQuery, frozen=True):
    """The query of POST /classify and POST /classify/batch."""

    model: Annotated[
        str | Absent,
        Field(
            description="a name from GET /models; without it, the default model answers; "
            "/classify takes several names, comma-separated, or `*` for all models"
        ),
    ] = None
    top_k: Annotated[
        Annotated[int, Field(ge=1)] | Absent,
        Field(
            description="number of classes in the answer; default 5, or all if there are fewer; "
            "with several models at most this number"
        ),
    ] = None
    attention: Annotated[
        bool | Literal["relevance"] | Absent,
        Field(
            description="add the last layer's attention map, or the relevance map of the best class"
        ),
        WithJsonSchema({"type": "string", "enum": ["false", "true", "0", "1", "relevance"]}),
    ] = None
    embedding: Annotated[bool, Field(description="add the features that the head reads")] = False
    labels: Annotated[
        str | Absent,
        Field(
            description="names to compare the picture with, comma-separated or a JSON array; "
            "for models with a text tower"
        ),
    ] = None
    min_score: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Absent,
        Field(description="lowest score of a prediction"),
    ] = None

    @property
    def names_several(self) -> bool:
        """Return whether several models are to answer."""
        return self.model is not None and ("," in self.model or self.model == ALL_MODELS)

    def requested(self, info: ModelInfo, *, cap: bool = False) -> RequestedOutputs:
        """Return the outputs requested of a model.

        Args:
            cap: reduce `top_k` to the number of classes, instead of refusing it.

        Raises:
            InvalidParameter, InputError: the model does not support the query.
        """
        config = info.config
        labels: tuple[str, ...] = ()
        if self.labels is not None or not config.num_classes:
            labels = labels_of_request(self.labels, info.zero_shot, config)
            config = with_labels(config, labels)
        classes = config.num_classes
        if self.top_k is not None and self.top_k > classes and not cap:
            available = f"the model has {classes} classes"
            if labels:
                available = f"there are {classes} labels"
            raise InvalidParameter(f"top_k {self.top_k}: {available}")
        attention: MapRequest | None = None
        if self.attention:
            method = "relevance" if self.attention == "relevance" else "cls"
            [attention] = parse_maps(config, labels or info.labels, method=method)
        return RequestedOutputs(
            min(self.top_k or DEFAULT_TOP_K, classes),
            attention,
            embedding=EmbeddingRequest() if self.embedding else None,
            labels=labels,
            label_set=info.coverage is not None,
            head_name=info.head,
        )


@router.post(
    "/classify",
    answer=Classification | Classifications,
    omit_none=True,
    body=ONE_PICTURE,
    responses=problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def classify(request: Request, query: ClassifyQuery) -> Response:
    """Classify one picture, by one model or by several.

    The picture is a multipart field `file`, or the body itself.
    """
    if query.names_several:
        return await _classify_by_several(request, query)
    model = await model_of(request, query.model)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        picture, query = await read_picture(request, admitted, query)
        if query.names_several:  # in the form
            models = await find_models(request, query)
            return await _answer_by_several(admitted, models, picture, query.min_score)
        await use_named_model(request, admitted, query.model)
        requested = query.requested(admitted.model.info)
        await admitted.take_slots(1)
        content = await classify_file(admitted, requested, query.min_score, picture)
    return Response(content, media_type="application/json")


async def classify_file(
    admitted: AdmittedRequest,
    requested: RequestedOutputs,
    min_score: float | None,
    picture: bytearray,
) -> bytes:
    """Return the `Classification` of a picture as JSON, and keep the picture."""
    decoded, result = await infer_file(admitted, picture, requested)
    model = admitted.model
    image_id = await keep(admitted, decoded.picture)
    admitted.count_image(model.info.name, result.outputs)
    classified = Classified(model, requested, decoded, result, image_id)

    def write() -> bytes:
        fields = classification_fields(admitted, classified, min_score)
        fields["timings_ms"] = _timings(admitted, [(decoded, result)])
        if image_id is not None:
            fields = {"id": image_id, **fields}
        return msgspec.json.encode(fields)

    # A document of many classes is large. In a batch, a job of its own writes each document.
    return await admitted.convert(write, size=requested.top_k)


async def _classify_by_several(request: Request, query: ClassifyQuery) -> Response:
    """Answer a request whose address names several models."""
    models = await find_models(request, query)
    async with admit(request, models.first) as admitted:
        picture, completed = await read_picture(request, admitted, query)
        if completed != query:
            models = await find_models(request, completed)
        return await _answer_by_several(admitted, models, picture, completed.min_score)


async def _answer_by_several(
    admitted: AdmittedRequest,
    models: SeveralModels,
    picture: bytearray,
    min_score: float | None,
) -> Response:
    """Answer with the `Classifications` of a picture; each pass takes one slot."""
    image_id = new_image_id()
    passes: list[Pass] = []
    if models.groups:
        await admitted.take_slots(len(models.groups))
        passes = await all_of(
            infer_by_group(admitted, picture, group, image_id) for group in models.groups
        )
    problems_by_name: dict[str, dict[str, Any]] = {}
    for errors in (models.failed, *(finished.failed for finished in passes)):
        for name, error in errors.items():
            problems_by_name[name] = problem_item(admitted, error)
    pictures = [classified for finished in passes for classified in finished.classified]
    for classified in pictures:
        admitted.count_image(classified.model.info.name, classified.result.outputs)

    def write() -> bytes:
        answers = dict(problems_by_name)
        for classified in pictures:
            fields = classification_fields(admitted, classified, min_score)
            answers[classified.model.info.name] = fields
        document: dict[str, object] = {}
        if any(finished.is_kept for finished in passes):
            document["id"] = image_id
        document["models"] = {name: answers[name] for name in models.names}
        took = [finished.took for finished in passes if finished.took is not None]
        document["timings_ms"] = _timings(admitted, took)
        return msgspec.json.encode(document)

    size = sum(classified.requested.top_k for classified in pictures)
    return Response(await admitted.convert(write, size=size), media_type="application/json")


# The fields of an answer


def classification_fields(
    admitted: AdmittedRequest, classified: Classified, min_score: float | None
) -> dict[str, Any]:
    """Return the fields of `ModelClassification`.

    Args:
        min_score: the lowest score of a prediction, if there is a limit.
    """
    model = classified.model
    outputs = classified.result.outputs
    labels = classified.requested.labels or model.info.labels
    fields = {
        "model": model.info.name,
        **class_fields(outputs, labels, min_score),
        "attention": _attention_fields(admitted, classified),
        "embedding": None if outputs.embedding is None else outputs.embedding.tolist(),
        "batch_size": classified.result.batch_size,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _attention_fields(admitted: AdmittedRequest, classified: Classified) -> dict[str, Any] | None:
    attention = classified.result.outputs.map
    if attention is None:
        return None
    labels = classified.requested.labels
    url = None
    # A map of a label of the request cannot be requested again by the picture's id.
    is_of_label = bool(labels) and attention.request.class_index is not None
    if classified.image_id is not None and not is_of_label:
        url = f"{admitted.sender.prefix}/attention?id={classified.image_id}"
        if attention.request.method == "cls":
            url += "&method=cls"
        url += model_parameter(admitted, classified.model)
    region = region_document(classified.decoded.picture.region)
    fields = map_fields(attention, labels or classified.model.info.labels)
    document = Attention(url=url, region=region, **fields)
    return document.model_dump(exclude_none=True, by_alias=True)


def _timings(
    admitted: AdmittedRequest, passes: Sequence[tuple[Decoded, InferenceResult]]
) -> dict[str, float]:
    """Return the milliseconds of each stage in its slowest pass, and of the request so far."""
    seconds = (0.0, 0.0, 0.0)
    if passes:
        stages = [
            (decoded.seconds, result.queue_seconds, result.inference_seconds)
            for decoded, result in passes
        ]
        seconds = tuple(map(max, zip(*stages, strict=True)))
    total = admitted.service.clock() - admitted.sender.started
    return {
        stage: round(1000 * duration, 2)
        for stage, duration in zip(Timings.model_fields, (*seconds, total), strict=True)
    }
