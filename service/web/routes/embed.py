"""POST /embed and POST /embed/batch: embeddings of pictures in JSON, NumPy files or base64."""

import base64
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model.features import normalized
from model.images.preprocess import ModelInput
from model.label_texts import MAX_TEXTS, checked_texts
from model.outputs import Pooling, RequestedOutputs
from model.parameters import parse_embedding
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter
from service.models.version import Lease
from service.web.admit import AdmittedRequest, admit, model_of, use_named_model
from service.web.body import (
    check_early,
    read_picture,
    read_pictures,
    read_whole,
    require_file,
)
from service.web.gather import of_each
from service.web.picture import embed_texts, infer_file, keep
from service.web.query import ModelQuery
from service.web.routes.endpoint import Router
from service.web.routes.openapi import BINARY, ONE_PICTURE, SEVERAL_PICTURES, problems
from service.web.routes.shared_answers import answer_each, npy_response, to_json
from service.web.upload import UploadedFile
from vitserve.documents import BatchEmbedding, Embedding, TextEmbeddings

router = Router("embed")


class EmbedQuery(ModelQuery, frozen=True):
    """The query of both endpoints."""

    pool: Annotated[
        Pooling,
        Field(
            description="`head`: the features that the head reads; `cls`, `mean`: the CLS token, "
            "or the mean of the patch tokens, after the final norm; `transfer`: CLS tokens of the "
            "last three blocks and that mean, which suit classifiers of other labels"
        ),
    ] = "head"
    normalize: Annotated[bool, Field(description="divide by the L2 norm")] = False
    format: Annotated[
        Literal["json", "npy", "base64"],
        Field(
            description="`json`: numbers; `npy`: a NumPy file of float32; `base64`: JSON with the "
            "bytes of little-endian float32 in base64"
        ),
    ] = "json"

    def requested(self, info: ModelInfo) -> RequestedOutputs:
        """Return the outputs requested of a model; raises `InputError`."""
        embedding = parse_embedding(info.config, self.pool, self.normalize)
        return RequestedOutputs(1, embedding=embedding)


class EmbedOneQuery(EmbedQuery, frozen=True):
    """The query of POST /embed."""

    text: Annotated[
        tuple[str, ...],
        Field(
            description="text to embed instead of a picture; repeat the parameter for several "
            "texts; for models with a text tower"
        ),
    ] = ()


def _answers(model: Any) -> dict[int, dict[str, Any]]:
    npy = {"application/x-npy": {"schema": BINARY}}
    return {200: {"model": model, "content": npy, "description": "In the requested format"}}


@router.post(
    "/embed",
    body=ONE_PICTURE | {"required": False},
    responses=_answers(Embedding | TextEmbeddings)
    | problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def embed(request: Request, query: EmbedOneQuery) -> Response:
    """Return the embedding of one picture, or the embeddings of texts.

    The picture is a multipart field `file`, or the body itself.
    """
    model = await model_of(request, query.model)
    if query.text:
        return await _embed_texts(request, query, model)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        picture, query = await read_picture(request, admitted, query)
        if query.text:
            raise InvalidParameter("text: there is a picture, too: send a picture or texts")
        await use_named_model(request, admitted, query.model)
        requested = query.requested(admitted.model.info)
        await admitted.take_slots(1)
        if query.format == "npy":
            _, embedding = await infer_embedding(admitted, requested, picture)
            return npy_response(embedding)
        content = await _embed_file(admitted, query, requested, picture)
    return Response(content, media_type="application/json")


@router.post(
    "/embed/batch",
    body=SEVERAL_PICTURES,
    responses=_answers(BatchEmbedding) | problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def embed_batch(request: Request, query: EmbedQuery) -> Response:
    """Return the embeddings of several pictures, multipart fields `file`.

    Each picture has its own answer or error. With `npy`, the first error fails the request.
    """
    model = await model_of(request, query.model)
    check_early(request, query, model)
    async with admit(request, model) as admitted:
        upload, query = await read_pictures(request, admitted, query)
        await use_named_model(request, admitted, query.model)
        requested = query.requested(admitted.model.info)
        await admitted.take_slots(len(upload.files))
        if query.format == "npy":
            infer = partial(infer_embedding, admitted, requested)
            rows = await of_each(infer, upload.files)
            return npy_response(np.stack([embedding for _, embedding in rows]))
        answer = partial(_embed_file, admitted, query, requested)
        return await answer_each(admitted, upload.files, answer)


async def infer_embedding(
    admitted: AdmittedRequest, requested: RequestedOutputs, file: UploadedFile
) -> tuple[ModelInput, NDArray[np.float32]]:
    """Return the picture of a file as the model sees it, and its embedding, float32 [D]."""
    decoded, result = await infer_file(admitted, require_file(file), requested)
    return decoded.picture, embedding_of(admitted, result)


def embedding_of(admitted: AdmittedRequest, result: InferenceResult) -> NDArray[np.float32]:
    """Return the embedding of an inferred picture, float32 [D], and count the picture."""
    admitted.count_image(admitted.model.info.name)
    assert result.outputs.embedding is not None, "the engine answers each request for an embedding"
    return result.outputs.embedding


async def _embed_file(
    admitted: AdmittedRequest, query: EmbedQuery, requested: RequestedOutputs, file: bytearray
) -> bytes:
    """Return the `Embedding` of a picture as JSON, and keep the picture."""
    picture, values = await infer_embedding(admitted, requested, file)
    image_id = await keep(admitted, picture)
    name = admitted.model.info.name
    embedding = _formatted(values, query)
    return to_json(Embedding(id=image_id, model=name, pool=query.pool, embedding=embedding))


async def _embed_texts(request: Request, query: EmbedOneQuery, model: Lease) -> Response:
    """Answer with the embeddings of texts, comparable with embeddings of pictures."""
    if model.info.zero_shot is None:
        raise InvalidParameter("text: the model has no text tower")
    if query.pool != "head":
        raise InvalidParameter("pool: does not apply to texts")
    texts = checked_texts(query.text, "text", MAX_TEXTS)
    async with admit(request, model) as admitted:
        if await read_whole(admitted):
            raise InvalidParameter("text: there is a body, too: send a picture or texts")
        await admitted.take_slots(1)
        features = await embed_texts(admitted, texts)
    if query.normalize:
        features = normalized(features)
    if query.format == "npy":
        return npy_response(features)
    embeddings = [_formatted(row, query) for row in features]
    content = to_json(
        TextEmbeddings(model=model.info.name, texts=list(texts), embeddings=embeddings)
    )
    return Response(content, media_type="application/json")


def _formatted(values: NDArray[np.float32], query: EmbedQuery) -> list[float] | str:
    """Return an embedding in the format of a query: numbers, or text in base64."""
    if query.format == "base64":
        return base64.b64encode(values.astype("<f4").tobytes()).decode()
    numbers: list[float] = values.tolist()
    return numbers
