"""The documents on the wire as pydantic models: the server's schema, and the client's types."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema

# An array in the OpenAPI document, instead of pydantic's `prefixItems` for a tuple.
RowsColumns = Annotated[
    tuple[int, int],
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}),
]
"""[rows, columns]"""

FIELD = "file"
"""Name of the multipart field that holds a picture."""


def significant(value: float) -> float:
    """Return a float32 without meaningless digits: 0.8299999833 becomes 0.83."""
    return float(f"{value:.7g}")


Pooling = Literal["head", "cls", "mean", "transfer"]
"""Which of the model's features an embedding has."""


class Prediction(BaseModel):
    """One class and its score."""

    label: Annotated[
        str,
        Field(
            description="human description; two classes may share one",
            examples=["tabby, tabby cat"],
        ),
    ]
    index: Annotated[int, Field(description="class index, unique in the model", examples=[281])]
    score: Annotated[
        float,
        Field(
            description="softmax (or sigmoid) after the checkpoint's temperature, "
            "or its calibrated form"
        ),
    ]


AbstainedBy = Literal["coverage", "distance", "min_score"]
"""Why a model abstains."""


class RegionDocument(BaseModel):
    """The rectangle of the upright original that the model saw and a map covers, in its pixels."""

    x: Annotated[float, Field(description="left edge")]
    y: Annotated[float, Field(description="upper edge")]
    width: float
    height: float


class _Map(BaseModel):
    """The fields of every map."""

    grid: Annotated[RowsColumns, Field(description="[rows, columns] of patches")]
    class_: Annotated[
        int | None, Field(alias="class", description="index of the explained class, if any")
    ] = None
    label: Annotated[str | None, Field(description="the label of that class")] = None
    score: Annotated[float | None, Field(description="the score of that class")] = None
    evidence: Annotated[
        float | None,
        Field(
            description="0...1: how strongly this picture supports that class; "
            "drawings fade with it"
        ),
    ] = None
    abstained: Annotated[
        bool | None,
        Field(description="if there is a class: the model abstains from all of its classes"),
    ] = None
    layer: Annotated[int | None, Field(description="`cls`: 0 is the first")] = None
    head: Annotated[
        int | Literal["mean", "max"] | None,
        Field(description="`cls`: how attention heads are combined"),
    ] = None
    values: Annotated[
        list[list[float]],
        Field(description="[rows][columns] of the method's result, summing to 1"),
    ]
    kept_mass: Annotated[float, Field(description="share of the attention that fell on patches")]
    region: RegionDocument


class Attention(_Map):
    """The attention map of a picture."""

    url: Annotated[
        str | None, Field(description="heat map of the kept picture", examples=["/attention?id=…"])
    ] = None
    method: str = "cls"


class ListedModel(BaseModel):
    """One model of GET /models."""

    name: str
    state: Literal["ready", "loading", "unloaded", "failed"]
    reason: Annotated[str, Field(description="why it is not ready")] = ""
    backbone: Annotated[
        str, Field(description="the same for models that share one; empty until it is known")
    ]
    classes: int | None = None
    bytes: Annotated[
        int, Field(description="measured memory of its backbone; 0 while that is not loaded")
    ]
    last_used_seconds: Annotated[float | None, Field(description="since its last picture")] = None
    default: bool
    taught: bool


class Timings(BaseModel):
    """Milliseconds of each stage."""

    decode: float
    queue: float
    inference: float
    total: Annotated[float, Field(description="since the request headers arrived")]


class ModelClassification(BaseModel):
    """The answer of one model to a picture."""

    model: str
    predictions: Annotated[list[Prediction], Field(description="highest score first")]
    set: Annotated[
        list[str] | None,
        Field(
            description="with VIT_COVERAGE: labels that include the right one that often, "
            "best first; absent beyond 100"
        ),
    ] = None
    set_size: Annotated[
        int | None, Field(description="with VIT_COVERAGE: number of labels in the set")
    ] = None
    abstained: Annotated[
        bool,
        Field(
            description="no label fits; `predictions` has the nearest ones that reach the least "
            "score"
        ),
    ] = False
    abstained_by: Annotated[
        AbstainedBy | None,
        Field(
            description="`coverage`: unlike the pictures of the calibration; `distance`: unlike "
            "all examples of a taught head; `min_score`: every score is below it, or below the "
            "label's threshold"
        ),
    ] = None
    attention: Attention | None = None
    embedding: Annotated[
        list[float] | None, Field(description="the features that the classifier reads, float32")
    ] = None
    batch_size: Annotated[int, Field(description="images that were computed together")]
    # (width, height) of a pixel of the sent picture, in pixels of the upright original.
    _pixel: tuple[float, float] = (1.0, 1.0)


class Kept(BaseModel):
    """An answer about a picture that may be kept."""

    id: Annotated[
        str | None, Field(description="for GET /attention, while the picture is kept")
    ] = None


class Classification(ModelClassification, Kept):  # in this order `id` is the first field
    """The answer of POST /classify."""

    timings_ms: Timings


class ProblemDocument(BaseModel):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    code: Annotated[str, Field(examples=["invalid_image"])]
    request_id: str


class FailedItem(BaseModel):
    """The error of one picture or model, in place of an answer."""

    error: ProblemDocument


class Classifications(Kept):
    """The answer of POST /classify by several models."""

    models: Annotated[dict[str, ModelClassification | FailedItem], Field(description="by name")]
    timings_ms: Timings


class BatchClassification(BaseModel):
    """The answer of POST /classify/batch, in the order of the files."""

    results: list[Classification | FailedItem]


class Embedding(Kept):
    """The answer of POST /embed."""

    model: str
    pool: Pooling
    embedding: Annotated[
        list[float] | str, Field(description="float32; `base64`: their bytes, little-endian")
    ]


class TextEmbeddings(BaseModel):
    """The answer of POST /embed to texts, in their order."""

    model: str
    texts: list[str]
    embeddings: Annotated[
        list[list[float] | str], Field(description="float32; `base64`: their bytes, little-endian")
    ]


class BatchEmbedding(BaseModel):
    """The answer of POST /embed/batch, in the order of the files."""

    results: list[Embedding | FailedItem]


class AttentionDocument(Kept, _Map):
    """The answer of /attention with `format=json`; a list of them for several classes."""

    method: str


MAPS: TypeAdapter[AttentionDocument | list[AttentionDocument]] = TypeAdapter(
    AttentionDocument | list[AttentionDocument]
)
"""The answer of /attention with `format=json`."""


class Labels(BaseModel):
    """The answer of GET /labels."""

    model: str
    labels: Annotated[list[str], Field(description="in index order")]


class ModelDescription(BaseModel):
    """The answer of GET /model."""

    name: str
    source: str
    revision: str | None
    content: Annotated[
        str,
        Field(
            description="16 digits that change with the weights, architecture, preprocessing or "
            "labels"
        ),
    ] = ""
    loaded_at: Annotated[datetime | None, Field(description="date of the load")] = None
    format: str
    architecture: str
    parameters: int
    input_size: Annotated[RowsColumns, Field(description="[rows, columns] in pixels")]
    channels: int
    patch_size: Annotated[
        int | None,
        Field(description="null, like `grid`, `layers` and `heads`, if a library runs the network"),
    ] = None
    grid: Annotated[RowsColumns | None, Field(description="[rows, columns] of patches")] = None
    layers: int | None = None
    heads: int | None = None
    width: Annotated[
        int,
        Field(description="of tokens, or of the features if a library runs the network"),
    ]
    classes: int
    pool: str | None = None
    runtime: Annotated[
        str,
        Field(description="who implements the network: `vitserve`, or a library such as `timm`"),
    ] = "vitserve"
    runtime_version: Annotated[str | None, Field(description="version of the library")] = None
    temperature: float
    score_form: Annotated[
        dict[str, float], Field(description="a softmax has power 1 and crowding 0")
    ] = {}
    multi_label: bool
    device: str
    dtype: str
    backend: Annotated[str, Field(description="what computes the network, with its version")]
    compiled: Annotated[str, Field(description="`compiled`, `compiling`, or why not")]
    max_batch: int
    batch_sizes: Annotated[
        list[int] | None, Field(description="fixed launch sizes; null: any up to max_batch")
    ]
    preprocessing: dict[str, Any]
    attention_source: Annotated[
        str | None,
        Field(
            description="`cls`: the CLS query's row; `patch_mean`: the mean over all patch queries"
        ),
    ] = None
    attention_methods: list[str]
    templates: Annotated[
        list[str] | None,
        Field(description="texts in which `{}` is a label; null: `labels` does not apply"),
    ] = None
    assumed: Annotated[
        list[str],
        Field(
            description="assumptions about facts that the checkpoint lacks, each with the setting "
            "that changes it"
        ),
    ] = []
    coverage: Annotated[
        float | None,
        Field(description="how often label sets include the right label; null: no sets"),
    ] = None
    calibrated_on: Annotated[
        int | None, Field(description="number of pictures in the calibration of label sets")
    ] = None
