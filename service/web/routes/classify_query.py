"""The query of POST /classify and POST /classify/batch, and the outputs that it requests."""

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from model.label_texts import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, EmbeddingRequest, MapRequest, RequestedOutputs
from model.parameters import parse_maps
from service.engine.messages import ModelInfo
from service.errors import InvalidParameter
from service.web.routes.query import Absent, ModelQuery, names_several


class ClassifyQuery(ModelQuery, frozen=True):
    """The query of both routes."""

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
        return names_several(self.model)

    def requested(self, info: ModelInfo) -> RequestedOutputs | None:
        """Return the outputs requested of the only model, or None if the query names several."""
        if self.names_several:
            return None
        return self.requested_of_one(info)

    def requested_of_one(self, info: ModelInfo, *, cap: bool = False) -> RequestedOutputs:
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
