"""The routes that clients of TorchServe, and of containers on SageMaker, call.

https://pytorch.org/serve/inference_api.html
https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-inference-code.html
"""

from contextlib import suppress
from typing import Annotated, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from model.outputs import Outputs, RequestedOutputs
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter, NotFound, UnknownModel
from service.web.admit import admit, model_of, service_of
from service.web.body import check_early, read_picture
from service.web.picture import infer_file
from service.web.query import Absent
from service.web.routes.classify import ClassifyQuery, classify
from service.web.routes.endpoint import Router
from service.web.routes.openapi import ONE_PICTURE, problems
from service.web.service import Service
from vitserve.documents import FIELD, Classification, significant

router = Router("other servers")

PROBES: Final = frozenset({"/ping"})
"""Paths that SageMaker and load balancers poll, without a key."""

_FIELDS: Final = (FIELD, "data", "body")
"""Names of the form field with the picture; TorchServe's clients use the last two."""

_VERSIONS: Final = ("", "1", "1.0")
"""The versions of each model in a path of TorchServe; empty without a version."""

_TARGET_MODEL: Final = "X-Amzn-SageMaker-Target-Model"
_PATH: Final = "/predictions/{name:path}"
_REFUSALS: Final = problems(400, 404, 408, 413, 415, 422, 500, 503, 504)


class PredictionQuery(BaseModel, frozen=True):
    """The query of POST /predictions."""

    labels: Annotated[str | Absent, Field(description="as for POST /classify")] = None

    def requested(self, info: ModelInfo) -> RequestedOutputs:
        """Return the outputs requested of a model; see `ClassifyQuery`."""
        return ClassifyQuery(labels=self.labels).requested(info)


class Health(BaseModel):
    """The answer of GET /ping."""

    status: Literal["Healthy"]


@router.get("/ping", answer=Health, responses=problems(503), is_loose=True)
async def ping(request: Request) -> Health:
    """Answer 200 when the model is ready, as /readyz."""
    service_of(request).check_ready()
    return Health(status="Healthy")


@router.post(
    "/invocations",
    answer=Classification,
    omit_none=True,
    body=ONE_PICTURE,
    responses=_REFUSALS,
)
async def invocations(request: Request, query: ClassifyQuery) -> Response:
    """Classify one picture, as POST /classify."""
    if _TARGET_MODEL in request.headers:
        raise InvalidParameter(f"{_TARGET_MODEL}: name the model by ?model=NAME instead")
    return await classify(request, query)


@router.post(_PATH, answer=dict[str, float], body=ONE_PICTURE, responses=_REFUSALS)
async def predictions(request: Request, query: PredictionQuery) -> Response:
    """Return the scores of the best classes by label, as TorchServe does.

    If classes share a label, it has the best score. With VIT_COVERAGE, only classes of the label
    set are returned. With thresholds, only classes that reach their threshold are. The answer is
    empty if the model abstains.

    The picture is the body, or a multipart field `data`, `body` or `file`.
    """
    name = _model_name(service_of(request), request.path_params["name"])
    model = await model_of(request, name)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        picture, query = await read_picture(request, admitted, query, fields=_FIELDS)
        requested = query.requested(model.info)
        await admitted.take_slots(1)
        _, result = await infer_file(admitted, picture, requested)
    outputs = result.outputs
    admitted.count_image(model.info.name, outputs)
    return JSONResponse(_by_label(outputs, requested.labels or model.info.labels))


@router.put(_PATH, answer=dict[str, float], body=ONE_PICTURE, responses=_REFUSALS)
async def predictions_by_put(request: Request, query: PredictionQuery) -> Response:
    """Answer as POST does: TorchServe's examples send the picture by `curl -T`, which is a PUT."""
    return await predictions(request, query)


def _model_name(service: Service, path: str) -> str:
    """Return the name of the model in a path, which may have slashes and end with a version.

    Raises:
        NotFound: the version does not exist.
    """
    with suppress(UnknownModel):
        service.models.key(path)
        return path
    name, _, version = path.rpartition("/")
    if not name:
        return path
    if version not in _VERSIONS:
        raise NotFound(f"version {version!r:.40}: the model has 1 only")
    return name


def _by_label(outputs: Outputs, labels: tuple[str, ...]) -> dict[str, float]:
    """Return the scores of the predicted classes; the best one of several with an equal label."""
    if outputs.far:
        return {}
    predicted = outputs.are_predicted()
    if outputs.label_set is not None:
        predicted[len(outputs.label_set) :] = False  # the label set has the best classes
    by_label: dict[str, float] = {}
    indices = outputs.indices[predicted].tolist()
    scores = outputs.scores[predicted].tolist()
    for index, score in zip(indices, scores, strict=True):
        by_label.setdefault(labels[index], significant(score))
    return by_label
