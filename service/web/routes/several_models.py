"""POST /classify by several models: one pass for all models of a backbone and preprocessing.

A model that fails costs only its own answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ImageError, InputError
from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import InferenceResult
from service.errors import InvalidParameter, MissingImage, ServiceError, UploadTooLarge
from service.models.lease import Lease
from service.web.admit import AdmittedRequest, admit
from service.web.decoders import Decoded
from service.web.gather import all_of
from service.web.image_stores import new_image_id
from service.web.picture import answer_by_head, compute, decode_file, infer_file, load_model
from service.web.routes.answers import (
    Classified,
    classification_fields,
    problem_item,
    timings,
)
from service.web.routes.endpoint import read_picture
from service.web.service import model_of, service_of

if TYPE_CHECKING:
    from service.web.routes.classify import ClassifyQuery

# Part of the request's time that loading a model may take; the rest is left for other models.
_LOADING_SHARE = 0.5

Group = list[tuple[Lease, RequestedOutputs]]
"""Models of one backbone and preprocessing, and the outputs requested of each."""


class SeveralModels(NamedTuple):
    """The models that a query names.

    Attributes:
        names: in the order of the query.
        groups: the models that answer; each group takes one pass.
        failed: the errors of the other models, by name.
        first: the model to admit the request with; the default model if none answers.
    """

    names: list[str]
    groups: list[Group]
    failed: dict[str, Exception]
    first: Lease


async def classify_by_several(request: Request, query: ClassifyQuery) -> Response:
    """Answer a request whose address names several models."""
    models = await find_models(request, query)
    async with admit(request, models.first) as admitted:
        picture, completed = await read_picture(request, admitted, query)
        if completed == query:
            return await _answer(admitted, models, picture, query.min_score)
        return await answer_by_several(request, admitted, completed, picture)


async def answer_by_several(
    request: Request, admitted: AdmittedRequest, query: ClassifyQuery, picture: bytearray
) -> Response:
    """Answer a request whose body is here, by the models that its query names now."""
    models = await find_models(request, query)
    return await _answer(admitted, models, picture, query.min_score)


# Find the models


async def find_models(request: Request, query: ClassifyQuery) -> SeveralModels:
    """Return the models that a query names.

    Raises:
        InvalidParameter: the query has too many names, or labels.
        UnknownModel: a name is unknown.
    """
    service = service_of(request)
    if query.labels is not None:
        raise InvalidParameter("labels: needs exactly one model")
    names = _names(query, service.models.names())
    for name in names:
        if name not in service.models.heads:  # an error of a served head is its answer
            service.models.key(name)
    models = await all_of(_find(request, name) for name in names)
    failed: dict[str, Exception] = {}
    groups: dict[tuple[object, ...], Group] = {}
    for name, model in zip(names, models, strict=True):
        if isinstance(model, ServiceError):
            failed[name] = model
            continue
        try:
            requested = query.requested(model.info, cap=True)
        except (InputError, ServiceError) as error:
            failed[name] = error
            continue
        key = (model.info.backbone or name, model.info.preprocess)
        groups.setdefault(key, []).append((model, requested))
    if groups:
        first, _ = next(iter(groups.values()))[0]
    else:
        first = await model_of(request)
    return SeveralModels(names, list(groups.values()), failed, first)


def _names(query: ClassifyQuery, known: Sequence[str]) -> list[str]:
    """Return the names in a query, without repetitions.

    Raises:
        InvalidParameter: the query has more names than there are models.
    """
    if query.model == "*":
        return list(known)
    names = (query.model or "").split(",")
    if len(names) > len(known):
        raise InvalidParameter(
            f"model: {len(names)} names; there are {len(known)} models, and * names all"
        )
    return list(dict.fromkeys(name.strip() for name in names))


async def _find(request: Request, name: str) -> Lease | ServiceError:
    try:
        return await model_of(request, name, share=_LOADING_SHARE)
    except ServiceError as error:
        return error


# Answer by them


class _Pass(NamedTuple):
    """The answers of a group of models.

    Attributes:
        answers: by the name of the model, each an answer or a problem.
        took: the decoded picture and the result of the pass, or None if it failed.
        is_kept: whether the picture is kept.
    """

    answers: dict[str, dict[str, Any]]
    took: tuple[Decoded, InferenceResult] | None = None
    is_kept: bool = False


async def _answer(
    admitted: AdmittedRequest,
    models: SeveralModels,
    picture: bytearray,
    min_score: float | None,
) -> Response:
    """Answer with the `Classifications` of a picture; each pass takes one slot."""
    image_id = new_image_id()
    passes: list[_Pass] = []
    if models.groups:
        await admitted.take_slots(len(models.groups))
        passes = await all_of(
            _infer_group(admitted, picture, group, image_id, min_score) for group in models.groups
        )
    answers = {name: problem_item(admitted, error) for name, error in models.failed.items()}
    for finished in passes:
        answers |= finished.answers
    document: dict[str, object] = {}
    if any(finished.is_kept for finished in passes):
        document["id"] = image_id
    document["models"] = {name: answers[name] for name in models.names}
    took = [finished.took for finished in passes if finished.took is not None]
    document["timings_ms"] = timings(admitted, took)
    size = sum(requested.top_k for group in models.groups for _, requested in group)
    content = await admitted.convert(partial(msgspec.json.encode, document), size=size)
    return Response(content, media_type="application/json")


async def _infer_group(
    admitted: AdmittedRequest,
    picture: bytearray,
    group: Group,
    image_id: str,
    min_score: float | None,
) -> _Pass:
    """Infer a picture by a group of models; raises only an error of the picture itself."""
    answers: dict[str, dict[str, Any]] = {}
    try:
        if not all(model.is_loaded for model, _ in group):
            group, answers = await _load(admitted, picture, group)
        if not group:
            return _Pass(answers)
        first, _ = group[0]
        with_first = admitted.with_model(replace(first, head=None))
        decoded, result = await infer_file(with_first, picture, _combined(group))
        cost = sum(model.head.multiplications for model, _ in group if model.head is not None)
        outputs_of_each = await compute(
            with_first, partial(_outputs_of_each, group, result.outputs), cost=cost
        )
    except (ImageError, MissingImage, UploadTooLarge):
        raise
    except Exception as error:  # noqa: BLE001  it is the answer of these models
        problem = problem_item(admitted, error)
        return _Pass(answers | {model.info.name: problem for model, _ in group})
    kept_id = await admitted.service.keep(decoded.picture, with_first.model, image_id)
    for (model, requested), outputs in zip(group, outputs_of_each, strict=True):
        name = model.info.name
        if isinstance(outputs, Exception):
            answers[name] = problem_item(admitted, outputs)
            continue
        admitted.count_image(name, outputs)
        result_of_model = replace(result, outputs=outputs)
        classified = Classified(model, requested, decoded, result_of_model, kept_id)
        answers[name] = classification_fields(admitted, classified, min_score)
    return _Pass(answers, (decoded, result), kept_id is not None)


def _combined(group: Group) -> RequestedOutputs:
    """Return the outputs that a group of models requests of one pass."""
    first, *others = [
        requested if model.head is None else model.head.backbone_request(requested)
        for model, requested in group
    ]
    return replace(first, more=tuple(others))


def _outputs_of_each(group: Group, outputs: Outputs) -> list[Outputs | Exception]:
    """Return the outputs of each model of a pass; a head that fails costs only its own answer."""
    answers: list[Outputs | Exception] = []
    for (model, requested), outputs_of_model in zip(group, (outputs, *outputs.more), strict=True):
        if model.head is None:
            answers.append(outputs_of_model)
            continue
        try:
            answers.append(answer_by_head(model.head, requested, outputs_of_model))
        except Exception as error:  # noqa: BLE001  it is the answer of this head
            answers.append(error)
    return answers


async def _load(
    admitted: AdmittedRequest, picture: bytearray, group: Group
) -> tuple[Group, dict[str, dict[str, Any]]]:
    """Load the models of a group once the picture is known to be valid.

    Returns:
        The loaded models, and the problems of the others by name.
    """
    first, _ = group[0]
    _, turn = await decode_file(admitted.with_model(first), picture)
    turn.leave()
    loaded: Group = []
    failed: dict[str, dict[str, Any]] = {}
    for model, requested in group:
        with_model = admitted.with_model(model)
        try:
            await load_model(with_model, share=_LOADING_SHARE)
        except ServiceError as error:
            failed[model.info.name] = problem_item(admitted, error)
        else:
            loaded.append((with_model.model, requested))
    return loaded, failed
