"""What becomes of an inference request: its inputs checked, its pictures computed, its outputs chosen."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.errors import ImageError
from model.heads import labels_of_request, with_labels
from model.outputs import (
    DEFAULT_TOP_K,
    Outputs,
    RequestedOutputs,
    embedding_width,
    methods_of,
    parse_embedding,
    parse_maps,
    require_classes,
)
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, NotFound, ServiceError, TooManyImages, UploadTooLarge
from service.web.inference_protocol import VERSION
from service.web.inference_protocol.tensors import (
    InferenceHeader,
    OutputTensor,
    Parameters,
    RequestedOutput,
    bytes_elements,
    uint8_elements,
)
from service.web.request import AdmittedRequest, Model, Service, all_of

T = TypeVar("T")

Inputs = list[bytearray] | NDArray[np.uint8]
"""The pictures of a request: encoded, or pixels uint8 [N, H, W, C] of the model's size."""


@dataclass(frozen=True)
class Output:
    """An output that a request may select: its values for one picture, and their shape, where -1 is `top_k`."""

    datatype: str
    shape: Callable[[ModelInfo], list[int]]
    values: Callable[[Outputs, Sequence[str]], NDArray[Any] | None]


def _grid(config: NetworkConfig) -> list[int]:
    assert isinstance(config, ViTConfig), "a model without maps has no such output"
    return [*config.grid]


OUTPUTS: Final[Mapping[str, Output]] = {
    "label": Output(
        "BYTES",
        lambda info: [-1],
        lambda outputs, labels: np.array([labels[each] for each in outputs.indices.tolist()], object),
    ),
    "index": Output("INT64", lambda info: [-1], lambda outputs, _: outputs.indices),
    "score": Output("FP32", lambda info: [-1], lambda outputs, _: outputs.scores),
    "logits": Output("FP32", lambda info: [info.config.num_classes or -1], lambda outputs, _: outputs.logits),
    "attention": Output(
        "FP32",
        lambda info: _grid(info.config),
        lambda outputs, _: None if outputs.map is None else outputs.map.values,
    ),
    "evidence": Output(
        "FP32",
        lambda info: [1],
        lambda outputs, _: (
            None
            if outputs.map is None or outputs.map.evidence is None
            else np.array([outputs.map.evidence], np.float32)
        ),
    ),
    "embedding": Output("FP32", lambda info: [embedding_width(info.config)], lambda outputs, _: outputs.embedding),
    "set_size": Output(
        "INT64",
        lambda info: [1],
        lambda outputs, _: None if outputs.label_set is None else np.array([len(outputs.label_set)], np.int64),
    ),
}
_BY_DEFAULT: Final = ("label", "index", "score")
_OF_CLASSES: Final = frozenset({*_BY_DEFAULT, "logits"})
_OF_MAPS: Final = frozenset({"attention", "evidence"})
# Characters of a request's id, which its answer repeats, and the bytes of waiting answers are not counted.
_MAX_ID: Final = 1024
# Methods of the output `attention`.
_MAPS: Final = ("cls", "relevance")


def outputs_of(info: ModelInfo) -> Mapping[str, Output]:
    """Return the outputs that a model has, by name: of classes and of maps only where it has any."""
    methods = methods_of(info.config)
    lacking = set() if info.config.num_classes or info.zero_shot is not None else {*_OF_CLASSES}
    lacking |= set() if methods else {"attention"}
    lacking |= set() if "relevance" in methods or info.zero_shot is not None else {"evidence"}
    lacking |= {"set_size"} if info.coverage is None else set()
    return {name: output for name, output in OUTPUTS.items() if name not in lacking}


def find_model(service: Service, name: str | None, version: str = "") -> Model:
    """Return the model of a name and version; None is the default, and an empty version is any.

    Raises `NotFound` if there is no such model, `EngineUnavailable` if it is not ready.
    """
    model = service.model(name)
    if version not in ("", VERSION):
        raise NotFound(f"version {version!r:.40}: the model has {VERSION} only")
    return model


def read_inputs(header: InferenceHeader, binary: Mapping[str, memoryview], info: ModelInfo, *, limit: int) -> Inputs:
    """Return the pictures of a request; `binary` has the bytes of the tensors whose data are not in the header.

    Raises:
        InvalidParameter: its inputs are not one tensor with a name, datatype and shape of the model.
        TooManyImages: its shape has more than `limit` pictures, which are then not read.
        MalformedRequest: see `service.web.inference_protocol.tensors`.
    """
    if len(header.inputs) != 1:
        raise InvalidParameter(f"{len(header.inputs)} inputs: expected 'image' or 'pixels', and not both")
    [tensor] = header.inputs
    data = binary.get(tensor.name)
    if data is None and tensor.data is None:
        raise InvalidParameter(f"input {tensor.name!r} has no data")
    if tensor.shape and tensor.shape[0] > limit:
        raise TooManyImages(f"{tensor.shape[0]} pictures: at most {limit} are allowed in one request")
    if tensor.name == "image":
        if tensor.datatype != "BYTES" or not (len(tensor.shape) == 1 or tensor.shape[1:] == [1]):
            raise InvalidParameter("input 'image' is BYTES of shape [N], each an encoded picture")
        return bytes_elements(tensor, data)
    if tensor.name == "pixels":
        shape = list(info.input_shape)
        if tensor.datatype != "UINT8" or tensor.shape[1:] != shape:
            raise InvalidParameter(f"input 'pixels' is UINT8 of shape [N, {', '.join(map(str, shape))}]")
        return uint8_elements(tensor, data)
    raise InvalidParameter(f"input {tensor.name!r:.80}: the model has 'image' and 'pixels'")


@dataclass(frozen=True)
class Selection:
    """The outputs that a request selects for each picture.

    Attributes:
        outputs: in the order of the answer, each with its own parameters.
        requested: of the engine, for one picture.
        binary: whether outputs without a parameter of their own are sent as bytes.
    """

    outputs: Sequence[RequestedOutput]
    requested: RequestedOutputs
    binary: bool

    @classmethod
    def of(cls, header: InferenceHeader, info: ModelInfo, *, binary: bool = False) -> Selection:
        """Return the selection of a request, or raise `InvalidParameter` or `InputError`.

        `binary` is the default of the request's parameter.
        """
        parameters = header.parameters
        if len(header.id or "") > _MAX_ID:
            raise InvalidParameter(f"the id has {len(header.id or '')} characters: at most {_MAX_ID} are allowed")
        text = parameters.get("labels")
        by_default = _BY_DEFAULT if info.config.num_classes or text is not None else ("embedding",)
        outputs = header.outputs or [RequestedOutput(name) for name in by_default]
        names = _names(outputs, info)
        labels = labels_of_request(text, info.zero_shot, info.config) if text is not None or names & _OF_CLASSES else ()
        config = with_labels(info.config, labels)
        pool = parameters.get("pool", "head")
        if labels and pool != "head":
            raise InvalidParameter("pool: does not apply beside labels, which are compared with what the head reads")
        method = _map_method(parameters, names, config)
        embedding = parse_embedding(info.config, pool, parameters.get("normalize", False))
        requested = RequestedOutputs(
            _top_k(parameters, outputs, config.num_classes),
            map=parse_maps(config, info.labels, method=method)[0] if names & _OF_MAPS else None,
            logits="logits" in names,
            embedding=embedding if "embedding" in names else None,
            labels=labels,
            label_set=info.coverage is not None,
        )
        return cls(outputs, requested, bool(parameters.get("binary_data_output", binary)))

    def size(self, info: ModelInfo) -> int:
        """Return the number of values in all outputs for one picture."""
        shapes = (OUTPUTS[output.name].shape(info) for output in self.outputs)
        return sum(math.prod(self.requested.top_k if side == -1 else side for side in shape) for shape in shapes)


def _names(outputs: Sequence[RequestedOutput], info: ModelInfo) -> set[str]:
    """Return the names of outputs; raises `InvalidParameter` or `InputError` if the model has no such output."""
    available = outputs_of(info)
    names = {output.name for output in outputs}
    if len(names) < len(outputs):
        raise InvalidParameter("an output is asked for twice")
    for output in outputs:
        if output.name not in available:
            require_classes(info.config)
            if output.name in _OF_MAPS and not methods_of(info.config):
                parse_maps(info.config, info.labels)  # raises what the model is instead
            raise InvalidParameter(f"output {output.name!r:.80}: the model has {', '.join(available)}")
        if "classification" in output.parameters and output.name != "score":
            raise InvalidParameter("the parameter 'classification' is for the output 'score'")
    return names


def _map_method(parameters: Parameters, names: set[str], config: NetworkConfig) -> str:
    """Return the method of the output `attention`: by default relevance where the model has it."""
    methods = [method for method in methods_of(config) if method in _MAPS] or list(_MAPS)
    method = parameters.get("attention", methods[0])
    if not isinstance(method, str) or method not in methods:
        raise InvalidParameter(f"attention {method!r:.80}: expected one of {', '.join(methods)}")
    if "evidence" in names and method != "relevance":
        raise InvalidParameter(f"output 'evidence': a map of attention {method!r} is of no class")
    return method


def _top_k(parameters: Parameters, outputs: Sequence[RequestedOutput], classes: int) -> int:
    """Return how many classes any output needs; raises `InvalidParameter`."""
    allowed = f"expected 1 to {classes}" if classes else "there are no classes and no labels"
    asked = [("top_k", parameters), *(("classification", output.parameters) for output in outputs)]
    counts = [(name, each[name]) for name, each in asked if each.get(name) is not None]
    for name, count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= classes:
            raise InvalidParameter(f"{name} {count!r:.40}: {allowed}")
    return max((count for _, count in counts), default=min(DEFAULT_TOP_K, max(classes, 1)))


async def infer(
    admitted: AdmittedRequest,
    header: InferenceHeader,
    inputs: Inputs,
    encode: Callable[[list[OutputTensor]], T],
    *,
    binary: bool = False,
) -> T:
    """Compute the pictures of a request, which take their places first, and return their encoded outputs.

    Args:
        encode: runs on a thread where there are many values.
        binary: see `Selection.of`.

    Raises:
        QueueFull: there are not as many places as pictures.
        ImageError, ServiceError: of the first picture that failed, its position named if there are several.
    """
    info = admitted.model.info
    selection = Selection.of(header, info, binary=binary)
    if len(inputs) == 0:
        raise InvalidParameter("there is no picture in the request")
    admitted.take(len(inputs))
    results = await all_of(_compute(admitted, inputs, position, selection.requested) for position in range(len(inputs)))
    admitted.service.metrics.images.inc(len(results))
    for result in results if info.config.num_classes else ():
        admitted.service.metrics.observe_classes(result.outputs)

    def answer() -> T:
        return encode(make_outputs(results, selection, selection.requested.labels or info.labels))

    return await admitted.write(answer, size=len(inputs) * selection.size(info))


async def _compute(
    admitted: AdmittedRequest, inputs: Inputs, position: int, requested: RequestedOutputs
) -> InferenceResult:
    """Return the result of the picture at a position; raises as `infer`."""
    picture = inputs[position]
    try:
        if not isinstance(picture, bytearray):
            return await admitted.infer(picture, requested)
        limit = admitted.service.settings.max_upload_bytes
        if len(picture) > limit:
            raise UploadTooLarge(f"{len(picture)} bytes: at most {limit} are allowed")
        return (await admitted.classify(picture, requested))[1]
    except (ImageError, ServiceError) as error:
        if len(inputs) == 1:
            raise
        raise at_position(error, position) from None


def at_position(error: ImageError | ServiceError, position: int) -> ImageError | ServiceError:
    """Return the error of one picture of a request with its position named."""
    named = copy.copy(error)  # the same error may be raised for each picture of a batch
    named.args = (f"picture {position}: {error}",)
    return named


def make_outputs(results: Sequence[InferenceResult], selection: Selection, labels: Sequence[str]) -> list[OutputTensor]:
    """Return the selected outputs: [N, K], [N, C] of logits, [N, rows, columns] of attention, [N, D]."""

    def stacked(name: str, count: int | None = None) -> NDArray[Any]:
        values = (OUTPUTS[name].values(result.outputs, labels) for result in results)
        return np.stack([each[:count] for each in values if each is not None])

    outputs: list[OutputTensor] = []
    for output in selection.outputs:
        binary = bool(output.parameters.get("binary_data", selection.binary))
        count = output.parameters.get("classification")
        if count is None:
            values = stacked(output.name)
        else:
            values = _classification(*(stacked(name, count) for name in ("score", "index", "label")))
        outputs.append(OutputTensor(output.name, values, binary=binary))
    return outputs


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
