"""The documents on the wire, as pydantic models: the schema of the answers, which the client reads."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field, TypeAdapter, WithJsonSchema

# Pydantic describes a tuple by `prefixItems`, which FastAPI turns into a form that OpenAPI 3.1 does
# not allow. [rows, columns].
RowsColumns = Annotated[
    tuple[int, int],
    WithJsonSchema({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}),
]

# Name of the multipart field that carries a picture.
FIELD = "file"


def significant(value: float) -> float:
    """Return a float32 without the digits that it does not have: 0.8299999833 becomes 0.83."""
    return float(f"{value:.7g}")


class Prediction(BaseModel):
    """One class and its score."""

    label: Annotated[
        str,
        Field(description="human description; labels may repeat", examples=["tabby, tabby cat"]),
    ]
    index: Annotated[int, Field(description="class index, which identifies", examples=[281])]
    score: Annotated[
        float,
        Field(
            description="softmax (or sigmoid) after the checkpoint's temperature, or its calibrated form"
        ),
    ]


def ranked(
    labels: Sequence[str], indices: Iterable[int], scores: Iterable[float]
) -> list[dict[str, object]]:
    """Return the fields of `Prediction` for the classes `indices`, with their float32 `scores`, in
    the order given.
    """
    pairs = zip(indices, scores, strict=True)
    return [
        {"label": labels[index], "index": index, "score": significant(score)}
        for index, score in pairs
    ]


AbstainedBy = Literal["coverage", "distance", "min_score"]
"""Why a model abstains."""

# Labels of the largest set that an answer spells out: more say little, and fewer would not have the
# coverage.
MAX_SET: Final = 100


def set_fields(labels: Sequence[str], indices: Sequence[int] | None) -> dict[str, Any]:
    """Return the fields of the set of the classes `indices`; none where the model has no coverage."""
    if indices is None:
        return {}
    fields: dict[str, Any] = {"set_size": len(indices)}
    if len(indices) <= MAX_SET:
        fields["set"] = [labels[index] for index in indices]
    return fields


class RegionDocument(BaseModel):
    """The rectangle of the upright original that a map covers: what the model saw of it, in its
    pixels.

    It lies within the photo.
    """

    x: Annotated[float, Field(description="left edge")]
    y: Annotated[float, Field(description="upper edge")]
    width: float
    height: float


class _Map(BaseModel):
    """What is said of every map."""

    grid: Annotated[RowsColumns, Field(description="[rows, columns] of patches")]
    class_: Annotated[
        int | None, Field(alias="class", description="whose map it is, where it is of one class")
    ] = None
    label: Annotated[str | None, Field(description="the label of that class")] = None
    score: Annotated[float | None, Field(description="the score of that class")] = None
    evidence: Annotated[
        float | None,
        Field(
            description="0...1: how much speaks for that class in this picture; drawings fade with it"
        ),
    ] = None
    abstained: Annotated[
        bool | None,
        Field(
            description="of a class: the model abstains, as little speaks for any of its classes"
        ),
    ] = None
    layer: Annotated[int | None, Field(description="`cls`: 0 is the first")] = None
    head: Annotated[
        int | Literal["mean", "max"] | None, Field(description="`cls`: how heads are combined")
    ] = None
    values: Annotated[
        list[list[float]],
        Field(description="[rows][columns] of what the method found, summing to 1"),
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
        str, Field(description="the same for models that share one; empty before it is known")
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
    total: Annotated[float, Field(description="from the request's head")]


class ModelClassification(BaseModel):
    """What one model says of a picture."""

    model: str
    predictions: Annotated[list[Prediction], Field(description="highest score first")]
    set: Annotated[
        list[str] | None,
        Field(
            description="with VIT_COVERAGE: labels that hold the right one so often, best first; absent beyond 100"
        ),
    ] = None
    set_size: Annotated[
        int | None, Field(description="with VIT_COVERAGE: labels in the set, however many")
    ] = None
    abstained: Annotated[
        bool,
        Field(
            description="no label fits; `predictions` has the nearest, but for those below a least score"
        ),
    ] = False
    abstained_by: Annotated[
        AbstainedBy | None,
        Field(
            description="`coverage`: unlike the pictures of the calibration; `distance`: unlike all examples of a "
            "taught head; `min_score`: every score is below it, or below the label's threshold"
        ),
    ] = None
    attention: Attention | None = None
    embedding: Annotated[list[float] | None, Field(description="what the head reads, float32")] = (
        None
    )
    batch_size: Annotated[int, Field(description="images that were computed together")]
    # Of the picture that the client sent: (width, height) in pixels of the upright original.
    _pixel: tuple[float, float] = (1.0, 1.0)


class Kept(BaseModel):
    """A picture that may be kept."""

    id: Annotated[
        str | None, Field(description="for GET /attention, while the picture is kept")
    ] = None


class Classification(ModelClassification, Kept):  # the id first
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
    """One picture of a batch that has no answer."""

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
    pool: Literal["head", "cls", "mean"]
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
    """The answer of /attention with `format=json`, or one of several where maps of several classes
    are asked for.
    """

    method: str


# What /attention answers with `format=json`.
MAPS: TypeAdapter[AttentionDocument | list[AttentionDocument]] = TypeAdapter(
    AttentionDocument | list[AttentionDocument]
)


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
            description="16 digits that change with the weights, architecture, preprocessing or labels"
        ),
    ] = ""
    loaded_at: Annotated[datetime | None, Field(description="date of the load")] = None
    format: str
    architecture: str
    parameters: int
    input_size: Annotated[RowsColumns, Field(description="[rows, columns] in pixels")]
    channels: int
    patch_size: Annotated[
        int | None, Field(description="null, as what follows, where a library runs the network")
    ] = None
    grid: Annotated[RowsColumns | None, Field(description="[rows, columns] of patches")] = None
    layers: int | None = None
    heads: int | None = None
    width: Annotated[
        int,
        Field(description="of tokens, or of what the head reads where a library runs the network"),
    ]
    classes: int
    pool: str | None = None
    runtime: Annotated[
        str, Field(description="whose code the network is: `vitserve`, or `timm`")
    ] = "vitserve"
    runtime_version: Annotated[str | None, Field(description="of the library")] = None
    temperature: float
    score_form: Annotated[
        dict[str, float], Field(description="a softmax has power 1 and crowding 0")
    ] = {}
    multi_label: bool
    device: str
    dtype: str
    backend: Annotated[str, Field(description="what runs the network, with its version")]
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
            description="what the checkpoint does not say and was chosen, each with the setting that says it"
        ),
    ] = []
    coverage: Annotated[
        float | None, Field(description="how often sets hold the right label; null: no sets")
    ] = None
    calibrated_on: Annotated[
        int | None, Field(description="pictures that the sets are made by")
    ] = None


class Accuracy(BaseModel):
    """How often a taught head is right with pictures like its examples, by cross-validation."""

    value: Annotated[
        float, Field(description="share of the examples that were right while they were held out")
    ]
    low: Annotated[
        float, Field(description="the true share lies between `low` and `high` with 95% confidence")
    ]
    high: float
    folds: int


class Confusion(BaseModel):
    """How many examples of a label were answered with another one while they were held out."""

    label: str
    answered: str
    count: int


class Suspect(BaseModel):
    """An example that the others contradict: its label is wrong, most often."""

    number: int
    label: str
    likely: Annotated[str, Field(description="the label that the others give it")]
    score: Annotated[
        float, Field(description="of the likely label, while the example was held out")
    ]


class Knowledge(BaseModel):
    """What a taught head knows of itself."""

    accuracy: Annotated[Accuracy | None, Field(description="absent before the head was fitted")] = (
        None
    )
    confusion: Annotated[
        list[Confusion], Field(description="the most frequent ones first, at most 100")
    ] = []
    suspects: Annotated[list[Suspect], Field(description="the worst ones first, at most 100")] = []
    needs_more: Annotated[list[str], Field(description="labels that need more pictures")] = []
    fitted_to: Annotated[int, Field(description="number of examples")] = 0
    fitted_at: Annotated[datetime | None, Field(description="date of the fit")] = None


class ExampleCounts(BaseModel):
    """How many examples each label of a head has."""

    head: str
    examples: dict[str, int]


class AddedExamples(ExampleCounts):
    """The answer to examples that were added, with their numbers."""

    numbers: list[int]


class HeadList(BaseModel):
    """The names of all taught heads."""

    enabled: Annotated[bool, Field(description="whether anything is taught here (VIT_TEACH)")]
    heads: list[str]
    thumbnails: Annotated[
        bool | None, Field(description="true where file names and thumbnails are kept, else absent")
    ] = None


class HeadDescription(ExampleCounts, Knowledge):
    """A taught head."""

    backbone: Annotated[str, Field(description="of which the features are")]
    model: Annotated[str, Field(description="with which it was begun")]
    up_to_date: Annotated[bool, Field(description="whether the head is fitted to all its examples")]
    reason: Annotated[
        str | None, Field(description="why its examples give no head, or it does not serve")
    ] = None


class ExampleDocument(BaseModel):
    """An example of a head."""

    number: int
    label: str
    time: datetime
    who: Annotated[str | None, Field(description="name of the key that sent it")] = None
    file_name: Annotated[
        str | None, Field(description="of the picture, with VIT_TEACH_THUMBNAILS")
    ] = None
    thumbnail: Annotated[
        str | None,
        Field(description="data URI of a JPEG, with VIT_TEACH_THUMBNAILS; lists have none"),
    ] = None


class ExampleList(BaseModel):
    """The examples of a head."""

    head: str
    examples: list[ExampleDocument]
