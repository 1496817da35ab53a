"""POST /classify: the classes of one picture, by one model."""

from typing import Annotated, Literal

import msgspec
from pydantic import Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from model.label_texts import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, EmbeddingRequest, MapRequest, RequestedOutputs
from model.parameters import parse_maps
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter
from service.web.admit import AdmittedRequest, admit
from service.web.picture import infer_file
from service.web.routes.answers import Classified, classification_fields, timings
from service.web.routes.endpoint import Router, check_early, read_picture, use_named_model
from service.web.routes.openapi import ONE_PICTURE, problems
from service.web.routes.query import Absent, ModelQuery
from service.web.routes.several_models import answer_by_several, classify_by_several
from service.web.service import model_of
from vitserve.documents import Classification, Classifications

router = Router("classify")


class ClassifyQuery(ModelQuery, frozen=True):
    """The query of POST /classify and POST /classify/batch."""

    model: Annotated[
        str | Absent,
        Field(
            description="a name from GET /models; default the default model; "
            "/classify takes several names, comma-separated, or `*` for all models"
        ),
    ] = None
    top_k: Annotated[
        Annotated[int, Field(ge=1)] | Absent,
        Field(description="number of classes in the answer; default 5, or all if there are fewer"),
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
        return self.model is not None and ("," in self.model or self.model == "*")

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
            head=info.head,
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
        return await classify_by_several(request, query)
    model = await model_of(request, query.model)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        picture, query = await read_picture(request, admitted, query)
        if query.names_several:  # the form does
            return await answer_by_several(request, admitted, query, picture)
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
    return await admitted.convert(write, size=requested.top_k)
