"""The documents about taught heads on the wire, as pydantic models."""

from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, Field


class Accuracy(BaseModel):
    """The cross-validated accuracy of a taught head on pictures like its examples."""

    value: Annotated[
        float, Field(description="share of examples answered right while they were held out")
    ]
    low: Annotated[
        float,
        Field(description="with 95% confidence the true share is between `low` and `high`"),
    ]
    high: float
    folds: int


class Confusion(BaseModel):
    """The number of held-out examples of a label that got another answer."""

    label: str
    answered: str
    count: int


class Suspect(BaseModel):
    """An example that contradicts the others, most often because its label is wrong."""

    number: int
    label: str
    likely: Annotated[str, Field(description="the label that the others suggest")]
    score: Annotated[
        float, Field(description="score of the likely label while the example was held out")
    ]


class Knowledge(BaseModel):
    """The accuracy of a taught head, and the examples to look at again."""

    accuracy: Annotated[
        Accuracy | None, Field(description="absent until the head has been fitted")
    ] = None
    confusion: Annotated[
        list[Confusion], Field(description="the most frequent ones first, at most 100")
    ] = []
    suspects: Annotated[list[Suspect], Field(description="the worst ones first, at most 100")] = []
    needs_more: Annotated[list[str], Field(description="labels that need more pictures")] = []
    fitted_to: Annotated[int, Field(description="number of examples")] = 0
    fitted_at: Annotated[datetime | None, Field(description="date of the fit")] = None


class ExampleCounts(BaseModel):
    """The number of examples of each label of a head."""

    head: str
    examples: dict[str, int]


class AddedExamples(ExampleCounts):
    """The answer to added examples, with their numbers."""

    numbers: list[int]


class HeadList(BaseModel):
    """The names of all taught heads."""

    enabled: Annotated[bool, Field(description="whether this service is taught (VIT_TEACH)")]
    heads: list[str]
    thumbnails: Annotated[
        bool | None,
        Field(description="true if file names and thumbnails are kept, else absent"),
    ] = None


class HeadDescription(ExampleCounts, Knowledge):
    """A taught head."""

    backbone: Annotated[str, Field(description="the backbone that gives the features")]
    model: Annotated[str, Field(description="the model on which the head was begun")]
    up_to_date: Annotated[bool, Field(description="whether the head is fitted to all its examples")]
    reason: Annotated[
        str | None, Field(description="why its examples give no head, or it does not serve")
    ] = None


class ExampleDocument(BaseModel):
    """An example of a head."""

    number: int
    label: str
    time: datetime
    who: Annotated[
        str | None, Field(description="name of the key that sent it; for the head's key")
    ] = None
    file_name: Annotated[
        str | None, Field(description="of the picture, with VIT_TEACH_THUMBNAILS")
    ] = None
    thumbnail: Annotated[
        str | None,
        Field(description="data URI of a JPEG, with VIT_TEACH_THUMBNAILS; lists do not include it"),
    ] = None


class ExampleList(BaseModel):
    """The examples of a head."""

    head: str
    examples: list[ExampleDocument]
