"""Several models that classify one picture.

Models with the same backbone and preprocessing share a pass. A model that fails costs only its own
answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from starlette.requests import Request

from model.errors import ImageError, InputError
from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import InferenceResult
from service.errors import InvalidParameter, MissingImage, ServiceError, UploadTooLarge
from service.models.all_models import Models
from service.models.version import Lease
from service.web.admit import AdmittedRequest, model_of, service_of
from service.web.decoders import Decoded
from service.web.gather import all_of
from service.web.picture import (
    answer_by_head,
    compute,
    decode_file,
    for_engine,
    infer_file,
    keep,
    load_model,
)

if TYPE_CHECKING:
    from service.web.routes.classify import ClassifyQuery

# The value of `model` that names all models.
ALL_MODELS: Final = "*"

# Part of the request's time that loading a model may take; the rest is left for other models.
_LOADING_SHARE = 0.5

# Fixed cost of one head's answer in multiplications, about 0.1 ms.
_COST_OF_HEAD = 1 << 18

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


class Classified(NamedTuple):
    """A picture that a model has classified.

    Attributes:
        image_id: the id of the kept picture, or None if it is not kept.
    """

    model: Lease
    requested: RequestedOutputs
    decoded: Decoded
    result: InferenceResult
    image_id: str | None


class Pass(NamedTuple):
    """The result of one pass for a group of models.

    Attributes:
        failed: the errors of the models that do not answer, by name.
        classified: the picture as each of the other models has classified it.
        took: the decoded picture and the result of the pass, or None if it failed.
        is_kept: whether the picture is kept.
    """

    failed: dict[str, Exception]
    classified: Sequence[Classified] = ()
    took: tuple[Decoded, InferenceResult] | None = None
    is_kept: bool = False


async def find_models(request: Request, query: ClassifyQuery) -> SeveralModels:
    """Return the models that a query names.

    Raises:
        InvalidParameter: the query has too many names, or an empty one, or it has `labels`.
        UnknownModel: a name is unknown.
    """
    service = service_of(request)
    if query.labels is not None:
        raise InvalidParameter("labels: needs exactly one model")
    names = _names(query, service.models)
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


def _names(query: ClassifyQuery, models: Models) -> list[str]:
    """Return the names in a query, without repetitions.

    Raises:
        UnknownModel: a name is unknown.
        InvalidParameter: a name is empty or `*`, or there are more names than models.
    """
    known = models.names()
    if query.model == ALL_MODELS:
        return known
    most = max(2, len(known))  # a single name that is sent twice gets this form of the answer
    names = [name.strip() for name in (query.model or "").split(",", most + 1)]
    for name in names[: most + 1]:
        if name in ("", ALL_MODELS):
            raise InvalidParameter(
                f"model {query.model!r:.200}: {name!r} is not a model's name; "
                f"expected names between commas, or {ALL_MODELS} alone for all models"
            )
        if name not in models.heads:  # a head's error becomes its answer
            models.key(name)
    if len(names) > most:
        raise InvalidParameter(
            f"model: more names than the {len(known)} models; send each once, or * for all"
        )
    return list(dict.fromkeys(names))


async def _find(request: Request, name: str) -> Lease | ServiceError:
    try:
        return await model_of(request, name, share=_LOADING_SHARE)
    except ServiceError as error:
        return error


async def infer_by_group(
    admitted: AdmittedRequest, picture: bytearray, group: Group, image_id: str
) -> Pass:
    """Infer a picture by a group of models; raises only an error of the picture itself."""
    failed: dict[str, Exception] = {}
    try:
        if not all(model.is_loaded for model, _ in group):
            failed = await _load(admitted, picture, group)
            group = [(model, requested) for model, requested in group if model.is_loaded]
        if not group:
            return Pass(failed)
        first, _ = group[0]
        with_first = admitted.with_model(replace(first, head=None))
        requests = [for_engine(requested, model.head) for model, requested in group]
        decoded, result = await infer_file(with_first, picture, _combined(requests))
        heads = [model.head for model, _ in group if model.head is not None]
        cost = sum(_COST_OF_HEAD + head.multiplications for head in heads)
        by_request = dict(
            zip(dict.fromkeys(requests), (result.outputs, *result.outputs.more), strict=True)
        )
        outputs_by_request = [by_request[request] for request in requests]
        outputs_by_model = await compute(
            with_first, partial(_outputs_by_model, group, outputs_by_request), cost=cost
        )
    except (ImageError, MissingImage, UploadTooLarge):
        raise
    except Exception as error:  # noqa: BLE001  it is the answer of these models
        return Pass(failed | {model.info.name: error for model, _ in group})
    kept_id = await keep(with_first, decoded.picture, image_id)
    classified: list[Classified] = []
    for (model, requested), outputs in zip(group, outputs_by_model, strict=True):
        if isinstance(outputs, Exception):
            failed[model.info.name] = outputs
        else:
            result_of_model = result._replace(outputs=outputs)
            classified.append(Classified(model, requested, decoded, result_of_model, kept_id))
    return Pass(failed, classified, (decoded, result), kept_id is not None)


def _combined(requests: Sequence[RequestedOutputs]) -> RequestedOutputs:
    """Return the outputs that a group of models requests of one pass, equal ones once.

    Heads that read the same features have equal requests.
    """
    first, *others = dict.fromkeys(requests)
    return replace(first, more=tuple(others))


def _outputs_by_model(group: Group, outputs: Sequence[Outputs]) -> list[Outputs | Exception]:
    """Return the outputs of each model of a pass; a head that fails costs only its own answer."""
    answers: list[Outputs | Exception] = []
    for (model, requested), outputs_of_model in zip(group, outputs, strict=True):
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
) -> dict[str, Exception]:
    """Load the models of a group once the picture is known to be valid; return errors by name."""
    first, _ = group[0]
    _, turn = await decode_file(admitted.with_model(first), picture)
    turn.leave()
    failed: dict[str, Exception] = {}
    for model, _ in group:
        try:
            await load_model(admitted.with_model(model), share=_LOADING_SHARE)
        except ServiceError as error:
            failed[model.info.name] = error
    return failed
