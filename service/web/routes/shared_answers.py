"""The answers that several routes have in common, as JSON or as a NumPy file."""

import io
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.responses import Response

from model.errors import ImageError
from model.images.preprocess import Region
from model.outputs import AttentionMap
from service.errors import ServiceError
from service.models.version import Lease
from service.web.admit import AdmittedRequest
from service.web.body import require_file
from service.web.gather import all_of
from service.web.problems import INTERNAL_ERROR, problem_of
from service.web.upload import UploadedFile
from vitserve.documents import RegionDocument, significant

logger = logging.getLogger("vitserve")


def json_response(document: Any) -> Response:
    """Return a document that msgspec encodes as JSON."""
    return Response(msgspec.json.encode(document), media_type="application/json")


def to_json(document: BaseModel) -> bytes:
    """Return a document as JSON, without the fields that are None."""
    return document.model_dump_json(exclude_none=True, by_alias=True).encode()


def npy_response(values: NDArray[np.float32], headers: Mapping[str, str] | None = None) -> Response:
    """Return an array as a NumPy file."""
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return Response(buffer.getvalue(), media_type="application/x-npy", headers=headers)


# Maps


def map_fields(attention: AttentionMap, labels: Sequence[str]) -> dict[str, Any]:
    """Return the fields that `Attention` and `AttentionDocument` have in common."""
    request = attention.request
    is_of_class = request.class_index is not None
    return {
        "method": request.method,
        "class": request.class_index,
        "label": None if request.class_index is None else labels[request.class_index],
        "score": None if attention.score is None else significant(attention.score),
        "evidence": None if attention.evidence is None else significant(attention.evidence),
        "abstained": attention.abstained if is_of_class else None,
        "grid": attention.values.shape,
        "layer": request.layer,
        "head": request.attention_head,
        "values": attention.values.astype(np.float64).round(7).tolist(),
        "kept_mass": significant(attention.kept_mass),
    }


def region_document(region: Region) -> RegionDocument:
    """Return a region, rounded to a thousandth of a pixel."""
    x, y, width, height = (round(side, 3) for side in region)
    return RegionDocument(x=x, y=y, width=width, height=height)


def model_parameter(admitted: AdmittedRequest, model: Lease) -> str:
    """Return the end of a link that names a model, or nothing for the default model."""
    default = admitted.service.models.default.info
    if default is not None and model.info.name == default.name:
        return ""
    return f"&model={model.info.name}"


# Batches


async def answer_each(
    admitted: AdmittedRequest,
    files: Sequence[UploadedFile],
    answer: Callable[[bytearray], Awaitable[bytes]],
) -> Response:
    """Answer each file of a batch with the JSON of `answer`, or with its problem."""

    async def item(file: UploadedFile) -> bytes:
        try:
            return await answer(require_file(file))
        except (ImageError, ServiceError) as error:
            return msgspec.json.encode(problem_item(admitted, error))

    results = b",".join(await all_of(map(item, files)))
    return Response(b'{"results":[%b]}' % results, media_type="application/json")


def problem_item(admitted: AdmittedRequest, error: Exception) -> dict[str, Any]:
    """Return the problem in place of one of several answers, and count it."""
    problem = problem_of(error)
    request_id = admitted.sender.request_id
    if problem.code == INTERNAL_ERROR:
        logger.error("request %s failed in part", request_id, exc_info=error)
    admitted.service.metrics.rejected.labels(problem.code).inc()
    return {"error": problem.document(request_id).model_dump()}
