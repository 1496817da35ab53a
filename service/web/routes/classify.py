"""POST /classify and POST /classify/batch, and what clients of TorchServe and of SageMaker's
containers call instead.

https://pytorch.org/serve/inference_api.html
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model.errors import ImageError, InputError
from model.heads import of_image
from model.label_texts import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, EmbeddingRequest, Outputs, RequestedOutputs
from model.parameters import parse_maps
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import (
    InvalidParameter,
    MissingImage,
    ServiceError,
    UnknownModel,
    UploadTooLarge,
)
from service.extensions.inference_protocol.inference import find_model
from service.web.admitted import AdmittedRequest, admit
from service.web.decoders import Decoded
from service.web.gather import all_of
from service.web.image_stores import new_image_id
from service.web.middleware import request_context
from service.web.picture import decode_file, infer_file, load_model, require_file, score, scored
from service.web.problems import INTERNAL_ERROR, problem_of
from service.web.routes.asked import Asked
from service.web.routes.attention import map_fields, query_of, region_document
from service.web.routes.endpoint import (
    NAME,
    ONE_PICTURE,
    SEVERAL_PICTURES,
    Absent,
    Endpoint,
    ModelQuery,
    problems,
)
from service.web.service import Model, model_of, service_of
from service.web.upload import UploadedFile
from vitserve.documents import (
    FIELD,
    Attention,
    BatchClassification,
    Classification,
    Classifications,
    Timings,
    ranked,
    set_fields,
    significant,
)

logger = logging.getLogger("vitserve")

router = APIRouter(tags=["classify"], route_class=Endpoint)
others = APIRouter(tags=["other servers"], route_class=Endpoint)

PUBLIC: Final = frozenset({"/ping"})
"""Paths that ask for no key: SageMaker and load balancers send none."""

_FIELDS: Final = (FIELD, "data", "body")
"""Names that TorchServe's clients give to the part with the picture."""

_PATH: Final = "/predictions/{name:path}"
_PREDICTION: Final = ONE_PICTURE | {"parameters": [NAME]}
_REFUSALS: Final = problems(400, 404, 408, 413, 415, 422, 500, 503, 504)


class ClassifyQuery(ModelQuery, frozen=True):
    """The query of both endpoints."""

    model: Annotated[
        str | Absent,
        Field(
            description="which of GET /models answers; /classify: several, comma-separated, or `*` for all"
        ),
    ] = None
    top_k: Annotated[
        Annotated[int, Field(ge=1)] | Absent,
        Field(description="classes to answer with; default the smaller of 5 and all"),
    ] = None
    attention: Annotated[
        bool | Literal["relevance"] | Absent,
        Field(
            description="answer with the last layer's attention map, too, or with the relevance of the best class"
        ),
        WithJsonSchema({"type": "string", "enum": ["false", "true", "0", "1", "relevance"]}),
    ] = None  # FastAPI would document a default that is no string
    embedding: Annotated[bool, Field(description="answer with what the head reads, too")] = False
    labels: Annotated[
        str | Absent,
        Field(
            description="names to compare with, comma-separated or a JSON array; for models with a text tower"
        ),
    ] = None
    min_score: Annotated[
        Annotated[float, Field(ge=0, le=1)] | Absent,
        Field(description="leave lower predictions out"),
    ] = None

    @property
    def names_several(self) -> bool:
        """Return whether several models are to answer."""
        return self.model is not None and ("," in self.model or self.model == "*")


@router.post(
    "/classify",
    response_model=Classification | Classifications,
    response_model_exclude_none=True,
    openapi_extra=ONE_PICTURE,
    responses=problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def classify(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify one picture: a multipart field `file`, or the raw body; by one model, or by several."""
    several = await _several(request, query) if query.names_several else None
    model = await model_of(request, query.model) if several is None else several.first
    asked = Asked(request, query, model, _of_one_or_several)
    async with admit(request, model) as admitted:
        if several is not None:
            several.hold(admitted)
        picture = await asked.read(admitted)
        if asked.wanted is not None:
            await admitted.take(1)
            content = await _answer(admitted, asked.wanted, asked.query.min_score, picture)
        else:
            if several is None or asked.query is not query:
                several = await _several(request, asked.query)
                several.hold(admitted)
            content = await _answer_by_several(admitted, several, picture, asked.query)
    return Response(content, media_type="application/json")


@router.post(
    "/classify/batch",
    response_model=BatchClassification,
    response_model_exclude_none=True,
    openapi_extra=SEVERAL_PICTURES,
    responses=problems(400, 404, 408, 413, 415, 422, 503),
)
async def classify_batch(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify several pictures (multipart fields `file`); each gets its own answer or its own
    error.
    """
    if query.names_several:
        raise InvalidParameter("model: one is expected here; POST /classify takes several")
    model = await model_of(request, query.model)
    asked = Asked(request, query, model, _requested)
    async with admit(request, model) as admitted:
        pictures = await asked.read_all(admitted)
        if asked.query.names_several:
            raise InvalidParameter("model: one is expected here; POST /classify takes several")
        await admitted.take(len(pictures))
        answer = partial(_answer, admitted, asked.wanted, asked.query.min_score)
        return await answer_each(admitted, pictures, answer)


def _of_one_or_several(query: ClassifyQuery, info: ModelInfo) -> RequestedOutputs | None:
    """Return what is asked of the only model, or None if the query names several."""
    return None if query.names_several else _requested(query, info)


def _requested(query: ClassifyQuery, info: ModelInfo, *, cap: bool = False) -> RequestedOutputs:
    """Return what is asked of each picture; raises `InvalidParameter` or `InputError`.

    `cap`: of more classes than there are all are meant.
    """
    config, labels = info.config, tuple[str, ...]()
    if query.labels is not None or not config.num_classes:
        labels = labels_of_request(query.labels, info.zero_shot, config)
        config = with_labels(config, labels)
    if query.top_k is not None and query.top_k > config.num_classes and not cap:
        compared = (
            f"there are {len(labels)} labels"
            if labels
            else f"the model has {config.num_classes} classes"
        )
        raise InvalidParameter(f"top_k {query.top_k}: {compared}")
    maps = []
    if query.attention:
        method = "relevance" if query.attention == "relevance" else "cls"
        maps = parse_maps(config, labels or info.labels, method=method)
    return RequestedOutputs(
        min(query.top_k or DEFAULT_TOP_K, config.num_classes),
        maps[0] if maps else None,
        embedding=EmbeddingRequest() if query.embedding else None,
        labels=labels,
        label_set=info.coverage is not None,
        head=info.head,
    )


async def _answer(
    admitted: AdmittedRequest,
    requested: RequestedOutputs,
    min_score: float | None,
    picture: bytearray,
) -> bytes:
    """Return a picture's `Classification` as JSON; the picture is put into the image store."""
    decoded, result = await infer_file(admitted, picture, requested)
    image_id, model = await admitted.service.keep(decoded.picture, admitted.model), admitted.model
    admitted.count_image(model.info.name, result.outputs)

    def write() -> bytes:
        fields = _fields(admitted, model, requested, decoded, result, image_id, min_score)
        fields |= {"timings_ms": _timings(admitted, [(decoded, result)])}
        return msgspec.json.encode(fields if image_id is None else {"id": image_id, **fields})

    # A document of many classes is large, and lives only until it is JSON: a batch has many such
    # documents.
    return await admitted.write(write, size=requested.top_k)


def _fields(
    admitted: AdmittedRequest,
    model: Model,
    requested: RequestedOutputs,
    decoded: Decoded,
    result: InferenceResult,
    image_id: str | None,
    min_score: float | None,
) -> dict[str, Any]:
    """Return what a model says of a picture: the fields of `ModelClassification`."""
    outputs, labels = result.outputs, requested.labels or model.info.labels
    attention = None
    if outputs.map is not None:
        # A map of a label of the request cannot be asked for again by the picture's id.
        of_labels = requested.labels and outputs.map.request.class_index is not None
        url = None
        if image_id is not None and not of_labels:
            path = _url(image_id, outputs.map.request.method) + query_of(admitted, model)
            url = admitted.sender.prefix + path
        region = region_document(decoded.picture.region)
        attention = Attention(url=url, region=region, **map_fields(outputs.map, labels))
    predicted = outputs.predicted(min_score)
    predictions = ranked(
        labels, outputs.indices[predicted].tolist(), outputs.scores[predicted].tolist()
    )
    abstained_by = outputs.abstained_by(min_score)
    fields = {
        "model": model.info.name,
        "predictions": predictions,
        **set_fields(labels, None if outputs.label_set is None else outputs.label_set.tolist()),
        "abstained": abstained_by is not None,
        "abstained_by": abstained_by,
        "attention": None
        if attention is None
        else attention.model_dump(exclude_none=True, by_alias=True),
        "embedding": None if outputs.embedding is None else outputs.embedding.tolist(),
        "batch_size": result.batch_size,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _timings(
    admitted: AdmittedRequest, passes: Sequence[tuple[Decoded, InferenceResult]]
) -> dict[str, float]:
    """Return the milliseconds of each stage, of the pass that took longest, and since the request's
    head.
    """
    stages = [
        (decoded.seconds, result.queue_seconds, result.inference_seconds)
        for decoded, result in passes
    ]
    longest = map(max, zip(*stages, strict=True)) if stages else (0.0, 0.0, 0.0)
    times = (*longest, admitted.service.clock() - admitted.sender.started)
    return {
        stage: round(1000 * each, 2)
        for stage, each in zip(Timings.model_fields, times, strict=True)
    }


# Several models


# Models of one backbone and preprocessing, and what each is asked for.
_Members = list[tuple[Model, RequestedOutputs]]


class _Several(NamedTuple):
    """The models that are to answer a picture.

    Attributes:
        names: as they were asked for.
        groups: the models of each pass.
        failed: why a model does not answer, by name.
        first: a model to admit the request with: the default one if none answers.
    """

    names: list[str]
    groups: list[_Members]
    failed: dict[str, Exception]
    first: Model

    def hold(self, admitted: AdmittedRequest) -> None:
        """Keep all models until the request ends."""
        for group in self.groups:
            for model, _ in group:
                admitted.with_model(model)


async def _several(request: Request, query: ClassifyQuery) -> _Several:
    """Return the models that a query names.

    Raises:
        InvalidParameter: there are too many names, or labels beside them.
        UnknownModel: a name is unknown.
    """
    service = service_of(request)
    if query.labels is not None:
        raise InvalidParameter("labels: needs exactly one model")
    names = _names(query, service.models.names())
    for name in names:
        if name not in service.models.added:  # a head that does not answer has an error of its own
            service.models.find(name)
    found = dict(zip(names, await all_of(_found(request, name) for name in names), strict=True))
    failed: dict[str, Exception] = {}
    groups: dict[tuple[object, ...], _Members] = {}
    for name, model in found.items():
        try:
            if isinstance(model, ServiceError):
                raise model
            requested = _requested(query, model.info, cap=True)
        except (InputError, ServiceError) as error:
            failed[name] = error
        else:
            groups.setdefault((model.info.backbone or name, model.info.preprocess), []).append(
                (model, requested)
            )
    members = [each for group in groups.values() for each in group]
    return _Several(
        names, list(groups.values()), failed, members[0][0] if members else service.model()
    )


def _names(query: ClassifyQuery, every: Sequence[str]) -> list[str]:
    """Return the models that a query names, each once; raises `InvalidParameter` of more names than
    models.
    """
    if query.model == "*":
        return list(every)
    text = query.model or ""
    if text.count(",") >= len(every):
        raise InvalidParameter(
            f"model: {text.count(',') + 1} names; there are {len(every)} models, and * names all"
        )
    return list(dict.fromkeys(each.strip() for each in text.split(",")))


async def _answer_by_several(
    admitted: AdmittedRequest, several: _Several, picture: bytearray, query: ClassifyQuery
) -> bytes:
    """Return `Classifications` as JSON: one pass for each backbone and preprocessing, which takes
    one slot.
    """
    passes: list[_Pass] = []
    image_id = new_image_id()
    if several.groups:
        await admitted.take(len(several.groups))
        passes = await all_of(
            _pass(admitted, picture, group, image_id, query) for group in several.groups
        )
    answers = {name: _item(admitted, error) for name, error in several.failed.items()}
    answers |= {name: answer for each in passes for name, answer in each.answers.items()}
    document: dict[str, object] = {"id": image_id} if any(each.is_kept for each in passes) else {}
    document |= {"models": {name: answers[name] for name in several.names}}
    document |= {
        "timings_ms": _timings(admitted, [each.took for each in passes if each.took is not None])
    }
    size = sum(asked.top_k for group in several.groups for _, asked in group)
    return await admitted.write(partial(msgspec.json.encode, document), size=size)


async def _found(request: Request, name: str) -> Model | ServiceError:
    """Return a model, or why it does not answer; others have half of the request's time left."""
    try:
        return await service_of(request).find(
            name, request_context(request.scope).started, share=0.5
        )
    except ServiceError as error:
        return error


class _Pass(NamedTuple):
    """What the models of one pass say of a picture, by name, what it took, and whether the picture
    is kept.
    """

    answers: dict[str, dict[str, Any]]
    took: tuple[Decoded, InferenceResult] | None = None
    is_kept: bool = False


async def _pass(
    admitted: AdmittedRequest,
    picture: bytearray,
    members: _Members,
    image_id: str,
    query: ClassifyQuery,
) -> _Pass:
    """Ask the models of one backbone and preprocessing; raises an error of the picture itself."""
    answers: dict[str, dict[str, Any]] = {}
    try:
        if any(model.unloaded for model, _ in members):
            members, answers = await _load(admitted, picture, members)
        if not members:
            return _Pass(answers)
        first = replace(members[0][0], taught=None)
        asked, *others = [
            wanted if model.taught is None else of_image(wanted, model.taught)
            for model, wanted in members
        ]
        by_first = admitted.with_model(first)
        decoded, result = await infer_file(by_first, picture, replace(asked, more=tuple(others)))
        cost = sum(model.taught.cost for model, _ in members if model.taught is not None)
        scores = await score(by_first, partial(_scored, members, result.outputs), cost=cost)
    except (ImageError, MissingImage, UploadTooLarge):  # of the picture, not of a model
        raise
    except Exception as error:  # noqa: BLE001  it becomes the answer of the models of this pass
        failed = _item(admitted, error)
        return _Pass(answers | {model.info.name: failed for model, _ in members})
    kept = await admitted.service.keep(decoded.picture, first, image_id)
    for (model, wanted), outputs in zip(members, scores, strict=True):
        name = model.info.name
        if isinstance(outputs, Exception):
            answers[name] = _item(admitted, outputs)
            continue
        admitted.count_image(name, outputs)
        own = replace(result, outputs=outputs)
        answers[name] = _fields(admitted, model, wanted, decoded, own, kept, query.min_score)
    return _Pass(answers, (decoded, result), kept is not None)


def _scored(members: _Members, outputs: Outputs) -> list[Outputs | Exception]:
    """Return what each model of a pass answers, or why it does not: a head that fails costs itself
    alone.
    """
    answers: list[Outputs | Exception] = []
    for (model, wanted), own in zip(members, (outputs, *outputs.more), strict=True):
        try:
            answers.append(own if model.taught is None else scored(own, model.taught, wanted))
        except Exception as error:  # noqa: BLE001  it becomes the answer of this head
            answers.append(error)
    return answers


async def _load(
    admitted: AdmittedRequest, picture: bytearray, members: _Members
) -> tuple[_Members, dict[str, dict[str, Any]]]:
    """Load models that are unloaded once a picture is seen to be one; return who answers, and
    others' problems.
    """
    _, turn = await decode_file(admitted.with_model(members[0][0]), picture)
    turn.leave()
    loaded: _Members = []
    failed: dict[str, dict[str, Any]] = {}
    for model, wanted in members:
        own = admitted.with_model(model)
        try:
            await load_model(own, share=0.5)
        except ServiceError as error:
            failed[model.info.name] = _item(admitted, error)
        else:
            loaded.append((own.model, wanted))
    return loaded, failed


def _item(admitted: AdmittedRequest, error: Exception) -> dict[str, Any]:
    """Return the problem of one of several answers, and count it."""
    problem = problem_of(error)
    if problem.code == INTERNAL_ERROR:
        logger.error("request %s failed in part", admitted.sender.request_id, exc_info=error)
    admitted.service.metrics.rejected.labels(problem.code).inc()
    return {"error": problem.document(admitted.sender.request_id).model_dump()}


async def answer_each(
    admitted: AdmittedRequest,
    pictures: Sequence[UploadedFile],
    answer: Callable[[bytearray], Awaitable[bytes]],
) -> Response:
    """Return for each picture of a batch what `answer` makes of it as JSON, or its problem."""

    async def item(picture: UploadedFile) -> bytes:
        try:
            return await answer(require_file(picture))
        except (ImageError, ServiceError) as error:
            return msgspec.json.encode(_item(admitted, error))

    results = b",".join(await all_of(map(item, pictures)))
    return Response(b'{"results":[%b]}' % results, media_type="application/json")


def _url(image_id: str, method: str) -> str:
    """Return where the same map of a stored picture is drawn."""
    return f"/attention?id={image_id}" + ("&method=cls" if method == "cls" else "")


class PredictionQuery(BaseModel, frozen=True):
    """The query of POST /predictions."""

    labels: Annotated[str | Absent, Field(description="that of POST /classify")] = None


def _of_labels(query: PredictionQuery, info: ModelInfo) -> RequestedOutputs:
    return _requested(ClassifyQuery(labels=query.labels), info)


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
    responses=problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def invocations(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify one picture, as POST /classify."""
    return await classify(request, query)


@others.post(
    "/predictions/{name:path}",
    response_model=dict[str, float],
    openapi_extra=_PREDICTION,
    responses=_REFUSALS,
)
async def predictions(request: Request, query: Annotated[PredictionQuery, Query()]) -> Response:
    """Return the scores of the best classes by label, as TorchServe does. Of equal labels the best
    stays.

    With VIT_COVERAGE they are those in the set of labels, with thresholds those that reach theirs:
    none where the model abstains.

    The picture is the body, or a multipart field `data`, `body` or `file`. `labels` is that of POST
    /classify.
    """
    path: str = request.path_params[
        "name"
    ]  # a model's name may have slashes, and a version may follow it
    service, started = service_of(request), request_context(request.scope).started
    name, _, version = path.rpartition("/")
    with suppress(UnknownModel):
        service.models.find(path)
        name, version = path, ""
    model = await find_model(
        service, name or path, version.removesuffix(".0") if name else "", started
    )
    asked = Asked(request, query, model, _of_labels)
    async with admit(request, model) as admitted:
        picture = await asked.read(admitted, fields=_FIELDS)
        await admitted.take(1)
        _, result = await infer_file(admitted, picture, asked.wanted)
    names = asked.wanted.labels or model.info.labels
    outputs = result.outputs
    admitted.count_image(model.info.name, outputs)
    predicted = outputs.predicted() & (not outputs.far)
    if outputs.label_set is not None:
        predicted[len(outputs.label_set) :] = False  # it has the best ones
    by_label: dict[str, float] = {}
    for index, class_score in zip(
        outputs.indices[predicted].tolist(), outputs.scores[predicted].tolist(), strict=True
    ):
        by_label.setdefault(names[index], significant(class_score))
    return JSONResponse(by_label)


@others.put(_PATH, response_model=dict[str, float], openapi_extra=_PREDICTION, responses=_REFUSALS)
async def predictions_by_put(
    request: Request, query: Annotated[PredictionQuery, Query()]
) -> Response:
    """Answer as POST does: TorchServe's examples send the picture by `curl -T`, which is a PUT."""
    return await predictions(request, query)
