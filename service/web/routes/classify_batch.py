"""POST /classify/batch: the classes of several pictures, by one model."""

from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from service.errors import InvalidParameter
from service.web.admit import admit, model_of, use_named_model
from service.web.body import check_early, read_pictures
from service.web.routes.classify import ClassifyQuery, classify_file
from service.web.routes.endpoint import Router
from service.web.routes.openapi import SEVERAL_PICTURES, problems
from service.web.routes.shared_answers import answer_each
from vitserve.documents import BatchClassification

router = Router("classify")


@router.post(
    "/classify/batch",
    answer=BatchClassification,
    omit_none=True,
    body=SEVERAL_PICTURES,
    responses=problems(400, 404, 408, 413, 415, 422, 503),
)
async def classify_batch(request: Request, query: ClassifyQuery) -> Response:
    """Classify several pictures, each with its own answer or its own error.

    The pictures are multipart fields `file`.
    """
    _require_one_model(query)
    model = await model_of(request, query.model)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        upload, query = await read_pictures(request, admitted, query)
        _require_one_model(query)
        await use_named_model(request, admitted, query.model)
        requested = query.requested(admitted.model.info)
        await admitted.take_slots(len(upload.files))
        answer = partial(classify_file, admitted, requested, query.min_score)
        return await answer_each(admitted, upload.files, answer)


def _require_one_model(query: ClassifyQuery) -> None:
    """Raise `InvalidParameter` if a query names several models."""
    if query.names_several:
        raise InvalidParameter("model: one is expected here; POST /classify takes several")
