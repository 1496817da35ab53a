"""POST /embed and POST /embed/batch: the embeddings of pictures, as JSON, a NumPy file or base64."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from model.features import normalized
from model.label_texts import MAX_TEXTS, checked_texts
from model.outputs import Pooling, RequestedOutputs
from model.parameters import parse_embedding
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter
from service.web.admitted import AdmittedRequest, admit
from service.web.gather import of_each
from service.web.picture import embed_texts, infer_file, require_file
from service.web.routes.asked import Asked
from service.web.routes.classify import answer_each
from service.web.routes.endpoint import (
    BINARY,
    ONE_PICTURE,
    SEVERAL_PICTURES,
    Endpoint,
    ModelQuery,
    npy_response,
    problems,
    to_json,
)
from service.web.service import Model, model_of
from service.web.upload import UploadedFile
from vitserve.documents import BatchEmbedding, Embedding, TextEmbeddings

router = APIRouter(tags=["embed"], route_class=Endpoint)


class EmbedQuery(ModelQuery, frozen=True):
    """The query of both endpoints."""

    pool: Annotated[
        Pooling,
        Field(
            description="what the head reads, the CLS token, or the mean of the patch tokens after the final norm; "
            "`transfer`: CLS tokens of the last three blocks and that mean, which taught heads read"
        ),
    ] = "head"
    normalize: Annotated[bool, Field(description="divide by the L2 norm")] = False
    format: Annotated[
        Literal["json", "npy", "base64"],
        Field(
            description="numbers; a NumPy file of float32; JSON with the bytes of little-endian float32 in base64"
        ),
    ] = "json"


class EmbedOneQuery(EmbedQuery, frozen=True):
    """The query of POST /embed."""

    text: Annotated[
        tuple[str, ...],
        Field(
            description="embed this instead of a picture; repeat it for several; for models with a text tower"
        ),
    ] = ()


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    npy = {"application/x-npy": {"schema": BINARY}}
    return {200: {"model": model, "content": npy, "description": "In the asked-for format"}}


@router.post(
    "/embed",
    response_class=Response,
    openapi_extra={"requestBody": ONE_PICTURE["requestBody"] | {"required": False}},
    responses=_answers(Embedding | TextEmbeddings)
    | problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def embed(request: Request, query: Annotated[EmbedOneQuery, Query()]) -> Response:
    """Return the embedding of one picture: a multipart field `file`, or the raw body; or those of
    texts.
    """
    model = await model_of(request, query.model)
    if query.text:
        return await _embed_texts(request, query, model)
    asked = Asked(request, query, model, _requested)
    async with admit(request, model) as admitted:
        picture = await asked.read(admitted)
        query = asked.query
        if query.text:
            raise InvalidParameter("text: there is a picture, too: send a picture or texts")
        await admitted.take(1)
        if query.format == "npy":
            return npy_response((await embed_all(admitted, asked.wanted, [picture]))[0])
        return Response(
            await _answer(admitted, query, asked.wanted, picture), media_type="application/json"
        )


@router.post(
    "/embed/batch",
    response_class=Response,
    openapi_extra=SEVERAL_PICTURES,
    responses=_answers(BatchEmbedding) | problems(400, 404, 408, 413, 415, 422, 500, 503, 504),
)
async def embed_batch(request: Request, query: Annotated[EmbedQuery, Query()]) -> Response:
    """Return the embeddings of several pictures (multipart fields `file`).

    Each gets its own answer or its own error; with `npy`, the first that fails is the error of the
    request.
    """
    model = await model_of(request, query.model)
    asked = Asked(request, query, model, _requested)
    async with admit(request, model) as admitted:
        pictures = await asked.read_all(admitted)
        await admitted.take(len(pictures))
        if asked.query.format == "npy":
            return npy_response(np.stack(await embed_all(admitted, asked.wanted, pictures)))
        return await answer_each(
            admitted, pictures, partial(_answer, admitted, asked.query, asked.wanted)
        )


def _requested(query: EmbedQuery, info: ModelInfo) -> RequestedOutputs:
    """Return what a query asks of each picture; raises `InputError`."""
    return RequestedOutputs(1, embedding=parse_embedding(info.config, query.pool, query.normalize))


def embedding_of(admitted: AdmittedRequest, result: InferenceResult) -> NDArray[np.float32]:
    """Return the embedding, float32 [D], of a picture that was computed, and count the picture."""
    admitted.count_image(admitted.model.info.name)
    assert result.outputs.embedding is not None, "the engine answers each request for an embedding"
    return result.outputs.embedding


async def embed_all(
    admitted: AdmittedRequest, requested: RequestedOutputs, pictures: Sequence[UploadedFile]
) -> list[NDArray[np.float32]]:
    """Return the embedding of each picture, float32 [D]; the first error is raised, with its place
    among several.
    """

    async def row(picture: UploadedFile) -> NDArray[np.float32]:
        return embedding_of(
            admitted, (await infer_file(admitted, require_file(picture), requested))[1]
        )

    return await of_each(row, pictures)


async def _answer(
    admitted: AdmittedRequest, query: EmbedQuery, requested: RequestedOutputs, picture: bytearray
) -> bytes:
    """Return a picture's `Embedding` as JSON; the picture is put into the image store."""
    decoded, result = await infer_file(admitted, picture, requested)
    embedding = _written(embedding_of(admitted, result), query)
    image_id = await admitted.service.keep(decoded.picture, admitted.model)
    return to_json(
        Embedding(id=image_id, model=admitted.model.info.name, pool=query.pool, embedding=embedding)
    )


async def _embed_texts(request: Request, query: EmbedOneQuery, model: Model) -> Response:
    """Return the features of texts, [N, D], which are compared with embeddings of pictures."""
    if model.info.zero_shot is None:
        raise InvalidParameter("text: the model has no text tower")
    if query.pool != "head":
        raise InvalidParameter("pool: does not apply to texts")
    texts = checked_texts(query.text, "text", MAX_TEXTS)
    async with admit(request, model) as admitted:
        if await admitted.body.read_whole():
            raise InvalidParameter("text: there is a body, too: send a picture or texts")
        await admitted.take(1)
        features = await embed_texts(admitted, texts)
    if query.normalize:
        features = normalized(features)
    if query.format == "npy":
        return npy_response(features)
    embeddings = [_written(row, query) for row in features]
    content = to_json(
        TextEmbeddings(model=model.info.name, texts=list(texts), embeddings=embeddings)
    )
    return Response(content, media_type="application/json")


def _written(values: NDArray[np.float32], query: EmbedQuery) -> list[float] | str:
    """Return an embedding as the query's format says."""
    as_text = query.format == "base64"
    return base64.b64encode(values.astype("<f4").tobytes()).decode() if as_text else values.tolist()
