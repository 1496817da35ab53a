"""The pictures of a new example: their query, and the features that the head reads."""

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.requests import Request

from model.extensions.taught.taught_heads import Features
from model.label_texts import checked_label, checked_texts
from model.outputs import EmbeddingRequest, RequestedOutputs
from service.engine.messages import ModelInfo
from service.errors import InferenceFailed, InvalidParameter
from service.extensions.teach.examples import HeadRow
from service.extensions.teach.settings import TeachSettings
from service.settings import Settings, settings_of
from service.web.admit import AdmittedRequest, use_named_model
from service.web.body import read_pictures, read_whole, require_file
from service.web.gather import of_each
from service.web.picture import infer_file, infer_pixels, kept_picture
from service.web.query import Absent
from service.web.routes.embed import embedding_of
from service.web.upload import UploadedFile


class ExampleQuery(BaseModel, frozen=True):
    """The query of POST /heads/NAME/examples; its form may have the parameters as fields."""

    label: Annotated[
        str | Absent, Field(description="label of the pictures; required, here or in the form")
    ] = None
    id: Annotated[
        str | Absent,
        Field(description="id of a kept picture, from an answer of /classify, instead of a body"),
    ] = None
    backbone: Annotated[
        str | Absent,
        Field(
            description="with the first example: the model whose features the head reads; "
            "the default model if absent"
        ),
    ] = None
    file_name: Annotated[
        Annotated[str, Field(max_length=256)] | Absent,
        Field(
            description="file name of the only picture instead of the form's; "
            "kept with VIT_TEACH_THUMBNAILS"
        ),
    ] = None

    def requested(self, _: ModelInfo) -> str:
        """Return the checked label; raises `InvalidParameter` if it is missing."""
        if self.label is None:
            raise InvalidParameter("label: missing: send ?label=cat, or a field of the form")
        return checked_label(self.label)


class NamedPixels(NamedTuple):
    """The name of a picture's file, empty if unknown, and the pixels uint8 [H, W, 3 or 1]."""

    file_name: str
    pixels: NDArray[np.uint8]


def features_of_head(head: HeadRow | None, info: ModelInfo) -> Features:
    """Return the features that a head reads; None means a new head."""
    return Features.of(info.config) if head is None else Features.named(head.backbone)


async def read_features(
    request: Request, admitted: AdmittedRequest, query: ExampleQuery, head: HeadRow | None
) -> tuple[ExampleQuery, NDArray[np.float32], list[NamedPixels]]:
    """Compute the features of each picture of a request, finite [N, D].

    The first error of a picture is the request's.

    Returns:
        The query with the fields of the form, the features, and the pictures whose thumbnails are
        kept.
    """
    settings = admitted.service.settings

    def wanted() -> RequestedOutputs:
        """Return the outputs for each picture; the form names the model first."""
        return RequestedOutputs(
            1, embedding=EmbeddingRequest(features_of_head(head, admitted.model.info).pool)
        )

    if query.id is not None:
        if await read_whole(admitted):
            raise InvalidParameter(
                "id: the request has a body too: send pictures, or the id of a kept picture"
            )
        file_names = _file_names(query, settings, [""])
        picture = await kept_picture(admitted.service, query.id, admitted.model)
        if picture is None:
            raise InvalidParameter(
                "id: no kept picture of this id in the form that the head's backbone reads"
            )
        await admitted.take_slots(1)
        rows = [
            (
                embedding_of(admitted, await infer_pixels(admitted, picture.pixels, wanted())),
                picture.pixels,
            )
        ]
    else:
        upload, query = await read_pictures(request, admitted, query)
        await use_named_model(request, admitted, query.backbone)
        query.requested(admitted.model.info)
        if query.id is not None:
            raise InvalidParameter(
                "id: the request has pictures too: send pictures, or the id of a kept picture"
            )
        file_names = _file_names(query, settings, upload.file_names)
        await admitted.take_slots(len(upload.files))

        async def row(picture: UploadedFile) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
            decoded, result = await infer_file(admitted, require_file(picture), wanted())
            return embedding_of(admitted, result), decoded.picture.pixels

        rows = await of_each(row, upload.files)
    features = np.stack([embedding for embedding, _ in rows])
    if not np.isfinite(features).all():
        raise InferenceFailed("the model gives features that are not finite")
    if not settings_of(settings, TeachSettings).teach_thumbnails:
        return query, features, []
    pixels = [pixels for _, pixels in rows]
    return query, features, list(map(NamedPixels, file_names, pixels))


def _file_names(query: ExampleQuery, settings: Settings, sent: Sequence[str]) -> list[str]:
    """Return the names of the pictures' files, or raise `InvalidParameter` or `InputError`.

    Args:
        sent: the names in the body, one a picture, empty if unknown.
    """
    keeps_names = settings_of(settings, TeachSettings).teach_thumbnails
    if query.file_name is not None:
        if not keeps_names:
            raise InvalidParameter(
                "file_name: not kept here: the service was started without VIT_TEACH_THUMBNAILS"
            )
        if len(sent) != 1:
            raise InvalidParameter(f"file_name: needs exactly one picture, got {len(sent)}")
        sent = [query.file_name]
    if not keeps_names:
        return [""] * len(sent)
    return [name and checked_texts([name], "file_name", 1, allows_hidden=True)[0] for name in sent]
