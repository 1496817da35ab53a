"""POST /embed and POST /embed/batch: the embeddings of pictures, as JSON, a NumPy file or base64."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from model.errors import ImageError
from model.images.preprocess import ModelInput
from model.outputs import Pooling, RequestedOutputs, parse_embedding
from model.heads import MAX_TEXTS, checked_texts, normalized
from service.errors import InvalidParameter, ServiceError, UploadTooLarge
from service.web.inference_protocol.inference import at_position
from service.web.pipeline import Pipeline, pipeline_of
from service.web.routes.classify import answer_batch, to_json
from service.web.routes.endpoint import BINARY, ONE_PICTURE, SEVERAL_PICTURES, Endpoint, npy_response, problems
from service.web.upload import UploadedFile
from service.web.work import unless_disconnected
from vitserve.documents import BatchEmbedding, Embedding, TextEmbeddings

router = APIRouter(tags=["embed"], route_class=Endpoint)


class EmbedQuery(BaseModel, frozen=True):
    """The query of both endpoints."""

    pool: Annotated[
        Pooling,
        Field(description="what the head reads, the CLS token, or the mean of the patch tokens after the final norm"),
    ] = "head"
    normalize: Annotated[bool, Field(description="divide by the L2 norm")] = False
    format: Annotated[
        Literal["json", "npy", "base64"],
        Field(description="numbers; a NumPy file of float32; JSON with the bytes of little-endian float32 in base64"),
    ] = "json"


class EmbedOneQuery(EmbedQuery, frozen=True):
    """The query of POST /embed."""

    text: Annotated[
        tuple[str, ...],
        Field(description="embed this instead of a picture; repeat it for several; for models with a text tower"),
    ] = ()


def _answers(model: Any) -> dict[int | str, dict[str, Any]]:
    content = {"application/x-npy": {"schema": BINARY}}
    return {200: {"model": model, "content": content, "description": "In the asked-for format"}}


@router.post(
    "/embed",
    response_class=Response,
    openapi_extra={"requestBody": ONE_PICTURE["requestBody"] | {"required": False}},
    responses=_answers(Embedding | TextEmbeddings) | problems(400, 408, 413, 415, 422, 500, 503, 504),
)
async def embed(request: Request, query: Annotated[EmbedOneQuery, Query()]) -> Response:
    """Return the embedding of one picture: a multipart field `file`, or the raw body; or those of texts."""
    pipeline = pipeline_of(request)
    if query.text:
        return await _embed_texts(pipeline, request, query)
    embedder = _Embedder(pipeline, request, query)
    if query.format == "npy":
        return npy_response((await pipeline.answer_picture(request, embedder.embed))[1])
    return Response(await pipeline.answer_picture(request, embedder.document), media_type="application/json")


@router.post(
    "/embed/batch",
    response_class=Response,
    openapi_extra=SEVERAL_PICTURES,
    responses=_answers(BatchEmbedding) | problems(400, 408, 413, 415, 422, 500, 503, 504),
)
async def embed_batch(request: Request, query: Annotated[EmbedQuery, Query()]) -> Response:
    """Return the embeddings of several pictures (multipart fields `file`).

    Each gets its own answer or its own error; with `npy`, the first that fails is the error of the request.
    """
    pipeline = pipeline_of(request)
    embedder = _Embedder(pipeline, request, query)
    if query.format == "npy":
        return npy_response(np.stack(await pipeline.answer_pictures(request, embedder.row)))
    return await answer_batch(pipeline, request, embedder.document)


async def _embed_texts(pipeline: Pipeline, request: Request, query: EmbedOneQuery) -> Response:
    """Return the features of texts, [N, D], which are compared with embeddings of pictures."""
    info = pipeline.model()
    if info.zero_shot is None:
        raise InvalidParameter("text: the model has no text tower")
    if query.pool != "head":
        raise InvalidParameter("pool: does not apply to texts")
    texts = checked_texts(query.text, "text", MAX_TEXTS)
    with pipeline.admit_upload(request) as upload:
        if await pipeline.read_body(request, upload):
            raise InvalidParameter("text: there is a body, too: send a picture or texts")
        upload.permit.extend(1)
        features = await unless_disconnected(request.receive, pipeline.embed_texts(texts, pipeline.deadline(request)))
    if query.normalize:
        features = normalized(features)
    if query.format == "npy":
        return npy_response(features)
    embeddings = [_written(row, query) for row in features]
    content = to_json(TextEmbeddings(model=info.name, texts=list(texts), embeddings=embeddings))
    return Response(content, media_type="application/json")


def _written(values: NDArray[np.float32], query: EmbedQuery) -> list[float] | str:
    """Return an embedding as the query's format says."""
    as_text = query.format == "base64"
    return base64.b64encode(values.astype("<f4").tobytes()).decode() if as_text else values.tolist()


class _Embedder:
    """Embeds the files of one request; raises `EngineUnavailable`, or `InputError` if the model has no such pool."""

    def __init__(self, pipeline: Pipeline, request: Request, query: EmbedQuery) -> None:
        self._pipeline = pipeline
        self._query = query
        self._info = pipeline.model()
        embedding = parse_embedding(self._info.config, query.pool, query.normalize)
        self._requested = RequestedOutputs(1, embedding=embedding)
        self._deadline = pipeline.deadline(request)

    async def embed(self, file: bytearray) -> tuple[ModelInput, NDArray[np.float32]]:
        """Decode and compute a picture; return it with its embedding [D]; raises `ImageError` or `ServiceError`."""
        decoded, result = await self._pipeline.compute(file, self._deadline, self._requested)
        self._pipeline.metrics.images.inc()
        assert result.outputs.embedding is not None, "the engine answers each request for an embedding"
        return decoded.picture, result.outputs.embedding

    async def row(self, position: int, file: UploadedFile) -> NDArray[np.float32]:
        """Return the embedding of one picture of a batch; its error names its position."""
        try:
            if isinstance(file, UploadTooLarge):
                raise file
            return (await self.embed(file))[1]
        except (ImageError, ServiceError) as error:
            raise at_position(error, position) from None

    async def document(self, file: bytearray) -> bytes:
        """Return the answer to a picture, which is kept, as JSON; raises as `embed`."""
        picture, values = await self.embed(file)
        image_id = await self._pipeline.pictures.put(picture)
        embedding = _written(values, self._query)
        return to_json(Embedding(id=image_id, model=self._info.name, pool=self._query.pool, embedding=embedding))
