"""The routes that clients of TorchServe's inference API and of SageMaker's containers call.

https://pytorch.org/serve/inference_api.html
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model.heads import labels_of_request
from model.outputs import DEFAULT_TOP_K, RequestedOutputs
from service.web.inference_protocol.inference import find_model
from service.web.request import model_of, service_of
from service.web.routes.classify import ClassifyQuery, classify
from service.web.routes.endpoint import ONE_PICTURE, Endpoint, problems
from vitserve.documents import FIELD, Classification, significant

PUBLIC: Final = frozenset({"/ping"})
"""Paths that ask for no key: SageMaker and load balancers send none."""

_FIELDS: Final = (FIELD, "data", "body")
"""Names that TorchServe's clients give to the part with the picture."""

_PATH: Final = "/predictions/{name:path}"
_NAME: Final = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
_LABELS: Final = {"name": "labels", "in": "query", "schema": {"type": "string"}}
_PREDICTION: Final = ONE_PICTURE | {"parameters": [_NAME, _LABELS]}
_REFUSALS: Final = problems(400, 404, 408, 413, 415, 422, 500, 503, 504)

router = APIRouter(tags=["other servers"], route_class=Endpoint)


class Health(BaseModel):
    """The answer of GET /ping."""

    status: Literal["Healthy"]


@router.get("/ping", response_model=Health, responses=problems(503))
async def ping(request: Request) -> Health:
    """Answer 200 when the model is ready, as /readyz."""
    service_of(request).check_ready()
    return Health(status="Healthy")


@router.post(
    "/invocations",
    response_model=Classification,
    response_model_exclude_none=True,
    openapi_extra=ONE_PICTURE,
    responses=problems(400, 408, 413, 415, 422, 500, 503, 504),
)
async def invocations(request: Request, query: Annotated[ClassifyQuery, Query()]) -> Response:
    """Classify one picture, as POST /classify."""
    return await classify(request, query)


@router.post(
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
    info = model.info
    labels = labels_of_request(request.query_params.get("labels"), info.zero_shot, info.config)
    names = labels or info.labels
    label_set = info.coverage is not None
    requested = RequestedOutputs(min(DEFAULT_TOP_K, len(names)), labels=labels, label_set=label_set)
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


@router.put(_PATH, response_model=dict[str, float], openapi_extra=_PREDICTION, responses=_REFUSALS)
async def predictions_by_put(request: Request) -> Response:
    """Answer as POST does: TorchServe's examples send the picture by `curl -T`, which is a PUT."""
    return await predictions(request)
