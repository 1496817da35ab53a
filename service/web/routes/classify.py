"""POST /classify: the classes of one picture, by one model."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from model.outputs import RequestedOutputs
from service.web.admitted import AdmittedRequest, admit
from service.web.picture import infer_file
from service.web.routes.answers import Classified, classification_fields, timings
from service.web.routes.classify_query import ClassifyQuery
from service.web.routes.endpoint import Router
from service.web.routes.openapi import ONE_PICTURE, problems
from service.web.routes.query import FormQuery
from service.web.routes.several_models import answer_by_several, classify_by_several
from service.web.service import model_of
from vitserve.documents import Classification, Classifications

router = Router("classify")


@router.post(
    "/classify",
    answer=Classification | Classifications,
    omit_none=True,
    extra=ONE_PICTURE,
    responses=problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def classify(request: Request, query: ClassifyQuery) -> Response:
    """Classify one picture, by one model or by several.

    The picture is a multipart field `file`, or the body itself.
    """
    if query.names_several:
        return await classify_by_several(request, query)
    model = await model_of(request, query.model)
    form = FormQuery(request, query, model, ClassifyQuery.requested)
    async with admit(request, model) as admitted:
        picture = await form.read_file(admitted)
        if form.requested is None:  # the form names several models
            return await answer_by_several(request, admitted, form.query, picture)
        await admitted.take(1)
        content = await classify_file(admitted, form.requested, form.query.min_score, picture)
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
    image_id = await admitted.service.keep(decoded.picture, model)
    admitted.count_image(model.info.name, result.outputs)
    classified = Classified(model, requested, decoded, result, image_id)

    def write() -> bytes:
        fields = classification_fields(admitted, classified, min_score)
        fields["timings_ms"] = timings(admitted, [(decoded, result)])
        if image_id is not None:
            fields = {"id": image_id, **fields}
        return msgspec.json.encode(fields)

    # A document of many classes is large, and a batch has many of them: each is written at once.
    return await admitted.write(write, size=requested.top_k)
