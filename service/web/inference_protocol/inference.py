"""What becomes of an inference request: its inputs checked, its pictures computed, its outputs chosen."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.errors import ImageError
from model.prediction import MapRequest, Outputs, RequestedOutputs, embedding_width, parse_embedding
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, NotFound, ServiceError, TooManyImages, UploadTooLarge
from service.web.awaiting import all_of
from service.web.inference_protocol import VERSION
from service.web.inference_protocol.tensors import (
    InferenceHeader,
    OutputTensor,
    RequestedOutput,
    bytes_elements,
    uint8_elements,
)
from service.web.lanes import Deadline
from service.web.pipeline import Pipeline, Upload

T = TypeVar("T")


@dataclass(frozen=True)
class Output:
    """An output that a request may ask for.

    Attributes:
        shape: of one picture's values; -1 is a size that differs by request: `top_k`.
        values: (outputs of the picture, labels) -> its values.
    """

    datatype: str
    shape: Callable[[ModelInfo], list[int]]
    values: Callable[[Outputs, Sequence[str]], NDArray[Any] | None]


OUTPUTS: Final[Mapping[str, Output]] = {
    "label": Output(
        "BYTES",
        lambda info: [-1],
        lambda outputs, labels: np.array([labels[each] for each in outputs.indices.tolist()], object),
    ),
    "index": Output("INT64", lambda info: [-1], lambda outputs, _: outputs.indices),
    "score": Output("FP32", lambda info: [-1], lambda outputs, _: outputs.scores),
    "logits": Output("FP32", lambda info: [info.config.num_classes], lambda outputs, _: outputs.logits),
    "attention": Output(
        "FP32", lambda info: [*info.config.grid], lambda outputs, _: None if outputs.map is None else outputs.map.values
    ),
    "embedding": Output("FP32", lambda info: [embedding_width(info.config)], lambda outputs, _: outputs.embedding),
}
_BY_DEFAULT: Final = ("label", "index", "score")
_DEFAULT_TOP_K: Final = 5
_MAX_ID: Final = 1024
"""Characters of a request's id, which its answer repeats: answers wait for their callers, and nobody counts them."""
_MAPS: Final[dict[str, Callable[[ModelInfo], MapRequest]]] = {
    "cls": lambda info: MapRequest.row(info.config.depth - 1),
    "relevance": lambda info: MapRequest("relevance"),
}


@dataclass(frozen=True)
class Inputs:
    """The pictures of a request: encoded, or pixels uint8 [N, H, W, C] of the model's size."""

    encoded: list[bytearray] | None
    pixels: NDArray[np.uint8] | None

    def __len__(self) -> int:
        return len(self.encoded if self.encoded is not None else self.pixels)  # type: ignore[arg-type]


def find_model(pipeline: Pipeline, name: str | None, version: str = "") -> ModelInfo:
    """Return the model of a name and version; None is any name, and nothing any version.

    Raises:
        NotFound: there is no such model.
        EngineUnavailable: none is ready.
    """
    info = pipeline.model()
    if name not in (None, info.name):
        raise NotFound(f"{name!r:.200}: no such model; there is {info.name!r}")
    if version not in ("", VERSION):
        raise NotFound(f"version {version!r:.40}: the model has {VERSION} only")
    return info


def read_inputs(header: InferenceHeader, binary: Mapping[str, memoryview], info: ModelInfo, *, limit: int) -> Inputs:
    """Return the pictures of a request.

    Args:
        binary: the bytes of each tensor whose data do not stand in the header, by name.

    Raises:
        InvalidParameter: it has not one input, of a name, datatype and shape that the model has.
        TooManyImages: its shape has more than `limit` pictures, which are then not looked at.
        MalformedRequest: see `service.web.inference_protocol.tensors`.
    """
    if len(header.inputs) != 1:
        raise InvalidParameter(f"{len(header.inputs)} inputs: expected 'image' or 'pixels', and not both")
    [tensor] = header.inputs
    data = binary.get(tensor.name)
    if data is None and tensor.data is None:
        raise InvalidParameter(f"input {tensor.name!r} has no data")
    if tensor.shape and tensor.shape[0] > limit:
        raise _too_many(tensor.shape[0], limit)
    if tensor.name == "image":
        if tensor.datatype != "BYTES" or not (len(tensor.shape) == 1 or tensor.shape[1:] == [1]):
            raise InvalidParameter("input 'image' is BYTES of shape [N], each an encoded picture")
        return Inputs(bytes_elements(tensor, data), None)
    if tensor.name == "pixels":
        shape = list(info.input_shape)
        if tensor.datatype != "UINT8" or tensor.shape[1:] != shape:
            raise InvalidParameter(f"input 'pixels' is UINT8 of shape [N, {', '.join(map(str, shape))}]")
        return Inputs(None, uint8_elements(tensor, data))
    raise InvalidParameter(f"input {tensor.name!r:.80}: the model has 'image' and 'pixels'")


@dataclass(frozen=True)
class Wanted:
    """What a request wants of each picture.

    Attributes:
        outputs: in the order of the answer, each with its own parameters.
        of_picture: what the engine is asked for.
        binary: whether outputs that do not say so themselves are sent as bytes.
    """

    outputs: Sequence[RequestedOutput]
    of_picture: RequestedOutputs
    binary: bool

    @classmethod
    def of(cls, header: InferenceHeader, info: ModelInfo, *, binary: bool = False) -> Wanted:
        """Return what a request wants.

        Raises:
            InvalidParameter, InputError: the model has not what is asked for, or the id is too long.
        """
        if len(header.id or "") > _MAX_ID:
            raise InvalidParameter(f"the id has {len(header.id or '')} characters: at most {_MAX_ID} are allowed")
        outputs = header.outputs or [RequestedOutput(name) for name in _BY_DEFAULT]
        classes = info.config.num_classes
        names = {output.name for output in outputs}
        if len(names) < len(outputs):
            raise InvalidParameter("an output is asked for twice")
        for output in outputs:
            if output.name not in OUTPUTS:
                raise InvalidParameter(f"output {output.name!r:.80}: the model has {', '.join(OUTPUTS)}")
            if "classification" in output.parameters and output.name != "score":
                raise InvalidParameter("the parameter 'classification' is for the output 'score'")
        counts = [_count(header.parameters, "top_k", classes)]
        counts += [_count(output.parameters, "classification", classes) for output in outputs]
        asked = [count for count in counts if count is not None]
        method = header.parameters.get("attention", "relevance")
        if not isinstance(method, str) or method not in _MAPS:
            raise InvalidParameter(f"attention {method!r:.80}: expected one of {', '.join(_MAPS)}")
        embedding = parse_embedding(
            info.config, header.parameters.get("pool", "head"), header.parameters.get("normalize", False)
        )
        return cls(
            outputs,
            RequestedOutputs(
                max(asked, default=min(_DEFAULT_TOP_K, classes)),
                map=_MAPS[method](info) if "attention" in names else None,
                logits="logits" in names,
                embedding=embedding if "embedding" in names else None,
            ),
            bool(header.parameters.get("binary_data_output", binary)),
        )

    def size(self, info: ModelInfo) -> int:
        """Return the number of values in all outputs for one picture."""
        shapes = (OUTPUTS[output.name].shape(info) for output in self.outputs)
        return sum(math.prod(self.of_picture.top_k if side == -1 else side for side in shape) for shape in shapes)


def _count(parameters: dict[str, Any], name: str, classes: int) -> int | None:
    count = parameters.get(name)
    if count is None:
        return None
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= classes:
        raise InvalidParameter(f"{name} {count!r:.40}: expected 1 to {classes}")
    return count


async def infer(
    pipeline: Pipeline,
    upload: Upload,
    header: InferenceHeader,
    inputs: Inputs,
    info: ModelInfo,
    deadline: Deadline,
    encode: Callable[[list[OutputTensor]], T],
    *,
    binary: bool = False,
) -> T:
    """Return what `encode` makes of the outputs that a request wants of its pictures, which take their places first.

    Args:
        encode: is called on a thread where there are many values.
        binary: see `Wanted`.

    Raises:
        ServiceError, ImageError: see `Wanted.of`, `check_count`, `Permit.extend` and `compute`.
    """
    wanted = Wanted.of(header, info, binary=binary)
    check_count(inputs, pipeline.settings.max_images_per_request)
    upload.permit.extend(len(inputs))
    results = await compute(pipeline, inputs, wanted, deadline)

    def answer() -> T:
        return encode(make_outputs(results, wanted, info.labels))

    size = len(inputs) * wanted.size(info)
    return await pipeline.lanes.documents.run_large(answer, deadline, size=size)


async def compute(pipeline: Pipeline, inputs: Inputs, wanted: Wanted, deadline: Deadline) -> list[InferenceResult]:
    """Return the result of each picture, in order.

    Raises:
        ImageError, ServiceError: that of the first picture that failed, its position named if there are several.
    """

    async def one(position: int) -> InferenceResult:
        try:
            if inputs.encoded is not None:
                data = inputs.encoded[position]
                limit = pipeline.settings.max_upload_bytes
                if len(data) > limit:
                    raise UploadTooLarge(f"{len(data)} bytes: at most {limit} are allowed")
                return (await pipeline.classify(data, deadline, wanted.of_picture))[1]
            assert inputs.pixels is not None
            return await pipeline.infer(inputs.pixels[position], deadline, wanted.of_picture)
        except (ImageError, ServiceError) as error:
            if len(inputs) == 1:
                raise
            raise at_position(error, position) from None

    results = await all_of(one(position) for position in range(len(inputs)))
    pipeline.metrics.images.inc(len(results))
    for result in results:
        pipeline.metrics.top1_score.observe(float(result.outputs.scores[0]))
    return results


def at_position(error: ImageError | ServiceError, position: int) -> ImageError | ServiceError:
    """Return the error of one picture of a request with its position named."""
    named = copy.copy(error)  # that of a whole batch is raised for each of its pictures
    named.args = (f"picture {position}: {error}",)
    return named


def _too_many(count: int, limit: int) -> TooManyImages:
    return TooManyImages(f"{count} pictures: at most {limit} are allowed in one request")


def check_count(inputs: Inputs, limit: int) -> None:
    """Raise `TooManyImages` if there are more pictures than `limit`, `InvalidParameter` if there is none."""
    if len(inputs) > limit:
        raise _too_many(len(inputs), limit)
    if len(inputs) == 0:
        raise InvalidParameter("there is no picture in the request")


def make_outputs(results: Sequence[InferenceResult], wanted: Wanted, labels: Sequence[str]) -> list[OutputTensor]:
    """Return the outputs that were asked for: [N, K], [N, C] of logits, [N, rows, columns] of attention, [N, D]."""

    def stacked(name: str, count: int | None = None) -> NDArray[Any]:
        values = (OUTPUTS[name].values(result.outputs, labels) for result in results)
        return np.stack([each[:count] for each in values if each is not None])

    found: list[OutputTensor] = []
    for output in wanted.outputs:
        binary = bool(output.parameters.get("binary_data", wanted.binary))
        count = output.parameters.get("classification")
        if count is None:
            values = stacked(output.name)
        else:
            values = _classification(*(stacked(name, count) for name in ("score", "index", "label")))
        found.append(OutputTensor(output.name, values, binary=binary))
    return found


def _classification(
    score: NDArray[np.float32], index: NDArray[np.int64], label: NDArray[np.object_]
) -> NDArray[np.object_]:
    """Return `value:index:label` [N, K].

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
    """
    rows = zip(score.tolist(), index.tolist(), label.tolist(), strict=True)
    return np.array(
        [[f"{value:f}:{number}:{name}" for value, number, name in zip(*row, strict=True)] for row in rows], object
    )
