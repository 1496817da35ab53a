"""What becomes of an inference request: its inputs checked, its pictures computed, its outputs
chosen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.label_texts import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, Outputs, RequestedOutputs, embedding_width
from model.parameters import methods_of, parse_embedding, parse_maps, require_classes
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import InvalidParameter, NotFound, TooManyImages, UploadTooLarge
from service.extensions.inference_protocol import VERSION
from service.extensions.inference_protocol.tensors import (
    InferenceRequest,
    OutputTensor,
    RequestedOutput,
)
from service.web.admitted import AdmittedRequest
from service.web.gather import of_each
from service.web.json_bodies import require_known
from service.web.picture import infer_file, infer_pixels
from service.web.service import Model, Service

T = TypeVar("T")

Pictures = list[bytearray] | NDArray[np.uint8]
"""The pictures of a request: encoded, or pixels uint8 [N, H, W, C] of the model's size."""


@dataclass(frozen=True)
class Output:
    """An output that a request may select.

    Attributes:
        shape: for one picture, where -1 is `top_k`.
        values: for one picture, from its outputs and the labels of its classes; None without what
        it is made of.
        exists: whether a model has it.
    """

    datatype: str
    shape: Callable[[ModelInfo], list[int]]
    values: Callable[[Outputs, Sequence[str]], NDArray[Any] | None]
    exists: Callable[[ModelInfo], bool]


def _has_classes(info: ModelInfo) -> bool:
    return bool(info.config.num_classes) or info.zero_shot is not None


def _grid(info: ModelInfo) -> list[int]:
    assert isinstance(info.config, ViTConfig), "a model without maps has no such output"
    return [*info.config.grid]


def _evidence(outputs: Outputs, _: Sequence[str]) -> NDArray[np.float32] | None:
    evidence = None if outputs.map is None else outputs.map.evidence
    return None if evidence is None else np.array([evidence], np.float32)


OUTPUTS: Final[Mapping[str, Output]] = {
    "label": Output(
        "BYTES",
        lambda info: [-1],
        lambda outputs, labels: np.array(
            [labels[each] for each in outputs.indices.tolist()], object
        ),
        _has_classes,
    ),
    "index": Output("INT64", lambda info: [-1], lambda outputs, _: outputs.indices, _has_classes),
    "score": Output("FP32", lambda info: [-1], lambda outputs, _: outputs.scores, _has_classes),
    "logits": Output(
        "FP32",
        lambda info: [info.config.num_classes or -1],
        lambda outputs, _: outputs.logits,
        _has_classes,
    ),
    "attention": Output(
        "FP32",
        _grid,
        lambda outputs, _: None if outputs.map is None else outputs.map.values,
        lambda info: bool(methods_of(info.config)),
    ),
    "evidence": Output(
        "FP32",
        lambda info: [1],
        _evidence,
        lambda info: "relevance" in methods_of(info.config) or info.zero_shot is not None,
    ),
    "embedding": Output(
        "FP32",
        lambda info: [embedding_width(info.config, info.features)],
        lambda outputs, _: outputs.embedding,
        lambda info: True,
    ),
    "set_size": Output(
        "INT64",
        lambda info: [1],
        lambda outputs, _: (
            None if outputs.label_set is None else np.array([len(outputs.label_set)], np.int64)
        ),
        lambda info: info.coverage is not None,
    ),
    "abstained": Output(
        "BOOL",
        lambda info: [1],
        lambda outputs, _: np.array([outputs.abstains]),
        lambda info: info.can_abstain,
    ),
}
_BY_DEFAULT: Final[tuple[str, ...]] = ("label", "index", "score")
_OF_CLASSES: Final = frozenset({*_BY_DEFAULT, "logits"})
_OF_MAPS: Final = frozenset({"attention", "evidence"})
# The parameters of a request, with the outputs that each has an effect on; none: on all.
_PARAMETERS: Final[Mapping[str, frozenset[str]]] = {
    "top_k": frozenset(_BY_DEFAULT),
    "labels": frozenset(),
    "attention": _OF_MAPS,
    "pool": frozenset({"embedding"}),
    "normalize": frozenset({"embedding"}),
    "binary_data_output": frozenset(),
}
_INPUT_PARAMETERS: Final = ("binary_data_size",)
_OUTPUT_PARAMETERS: Final = ("classification", "binary_data")
# Characters of a request's id, which its answer repeats, and the bytes of waiting answers are not
# counted.
_MAX_ID: Final = 1024
# Bytes of base64 that are read in the time of one number.
BYTES_A_VALUE: Final = 256
# Methods of the output `attention`.
_MAPS: Final = ("cls", "relevance")


def outputs_of(info: ModelInfo) -> Mapping[str, Output]:
    """Return the outputs that a model has, by name: of classes and of maps only where it has any."""
    return {name: output for name, output in OUTPUTS.items() if output.exists(info)}


def inputs_of(info: ModelInfo) -> dict[str, tuple[str, list[int]]]:
    """Return the datatype and shape of the inputs of a model, by name; -1 differs by request."""
    return {"image": ("BYTES", [-1]), "pixels": ("UINT8", [-1, *info.input_shape])}


async def find_model(service: Service, name: str | None, version: str, started: float) -> Model:
    """Return the model of a name and version; None is the default, and an empty version is any.

    Raises `NotFound` if there is no such version, and as `Service.find`.
    """
    check_version(version)
    return await service.find(name, started)


def check_version(version: str) -> None:
    """Raise `NotFound` unless a model has this version."""
    if version not in ("", VERSION):
        raise NotFound(f"version {version!r:.40}: the model has {VERSION} only")


@dataclass(frozen=True)
class Inference:
    """What a request asks of a model.

    Attributes:
        outputs: in the order of the answer, each with its own parameters.
        requested: of the engine, for each picture.
        binary: whether outputs without a parameter of their own are sent as bytes.
    """

    id: str | None
    pictures: Pictures
    outputs: Sequence[RequestedOutput]
    requested: RequestedOutputs
    binary: bool

    @classmethod
    def of(cls, request: InferenceRequest, info: ModelInfo, *, limit: int) -> Self:
        """Return what a request asks of a model, of at most `limit` pictures.

        Raises:
            InvalidParameter, InputError: the model has no such input, output or parameter; an
                output or parameter does not apply.
            TooManyImages: there are too many pictures, which are then not read.
            MalformedRequest: see `service.extensions.inference_protocol.tensors`.
        """
        _check_parameters(request)
        pictures = _pictures(request, info, limit)
        if len(request.id or "") > _MAX_ID:
            raise InvalidParameter(
                f"the id has {len(request.id or '')} characters: at most {_MAX_ID} are allowed"
            )
        if len(pictures) == 0:
            raise InvalidParameter("there is no picture in the request")
        has_labels = info.config.num_classes or request.parameters.get("labels") is not None
        by_default = _BY_DEFAULT if has_labels else ("embedding",)
        if has_labels and OUTPUTS["abstained"].exists(info):
            by_default += ("abstained",)
        outputs = request.outputs or [RequestedOutput(name) for name in by_default]
        requested = _requested(request.parameters, outputs, info)
        return cls(
            request.id,
            pictures,
            outputs,
            requested,
            bool(request.parameters.get("binary_data_output")),
        )

    def size(self, info: ModelInfo) -> int:
        """Return the number of values in all outputs."""
        shapes = (OUTPUTS[output.name].shape(info) for output in self.outputs)
        values = sum(
            math.prod(self.requested.top_k if side == -1 else side for side in shape)
            for shape in shapes
        )
        return len(self.pictures) * values


def _check_parameters(request: InferenceRequest) -> None:
    """Raise `InvalidParameter` if a parameter of the request, an input or an output is unknown, or
    not a flag.
    """
    require_known(request.parameters, _PARAMETERS)
    for tensor in request.inputs:
        require_known(tensor.parameters, _INPUT_PARAMETERS, f"input {tensor.name!r:.80}: ")
    for output in request.outputs:
        require_known(output.parameters, _OUTPUT_PARAMETERS, f"output {output.name!r:.80}: ")
    flags = [("binary_data_output", request.parameters)]
    flags += [("binary_data", output.parameters) for output in request.outputs]
    for name, parameters in flags:
        value = parameters.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidParameter(f"{name} {value!r:.40}: expected true or false")


def _pictures(request: InferenceRequest, info: ModelInfo, limit: int) -> Pictures:
    """Return the pictures of a request; raises as `Inference.of`."""
    if len(request.inputs) != 1:
        raise InvalidParameter(
            f"{len(request.inputs)} inputs: expected 'image' or 'pixels', and not both"
        )
    [tensor] = request.inputs
    if tensor.data is None:
        raise InvalidParameter(f"input {tensor.name!r} has no data")
    if tensor.shape and tensor.shape[0] > limit:
        raise TooManyImages(
            f"{tensor.shape[0]} pictures: at most {limit} are allowed in one request"
        )
    if tensor.name not in inputs_of(info):
        raise InvalidParameter(f"input {tensor.name!r:.80}: the model has 'image' and 'pixels'")
    datatype, [_, *sides] = inputs_of(info)[tensor.name]
    is_column = tensor.name == "image" and tensor.shape[1:] == [1]
    if (
        tensor.datatype != datatype
        or not tensor.shape
        or not (tensor.shape[1:] == sides or is_column)
    ):
        shape = ", ".join(map(str, ["N", *sides]))
        raise InvalidParameter(f"input {tensor.name!r} is {datatype} of shape [{shape}]")
    return tensor.files() if datatype == "BYTES" else tensor.pixels()


def _requested(
    parameters: Mapping[str, Any], outputs: Sequence[RequestedOutput], info: ModelInfo
) -> RequestedOutputs:
    """Return what is asked of the engine; raises as `Inference.of`."""
    names, text = _names(outputs, info), parameters.get("labels")
    labels = (
        labels_of_request(text, info.zero_shot, info.config)
        if text is not None or names & _OF_CLASSES
        else ()
    )
    config = with_labels(info.config, labels)
    pool = parameters.get("pool", "head")
    if labels and pool != "head":
        raise InvalidParameter(
            "pool: does not apply beside labels, which are compared with what the head reads"
        )
    method = _map_method(parameters, names, config)
    embedding = parse_embedding(info.config, pool, parameters.get("normalize", False))
    for name, affected in _PARAMETERS.items():
        if affected and parameters.get(name) is not None and not names & affected:
            wanted = " or ".join(sorted(affected))
            raise InvalidParameter(
                f"{name}: does not apply to these outputs; ask for the output {wanted}"
            )
    return RequestedOutputs(
        _top_k(parameters, outputs, config.num_classes),
        map=parse_maps(config, info.labels, method=method)[0] if names & _OF_MAPS else None,
        logits="logits" in names,
        embedding=embedding if "embedding" in names else None,
        labels=labels,
        label_set=info.coverage is not None,
    )


def _names(outputs: Sequence[RequestedOutput], info: ModelInfo) -> set[str]:
    """Return the names of outputs; raises `InvalidParameter` or `InputError` if the model has no
    such output.
    """
    available = outputs_of(info)
    names = {output.name for output in outputs}
    if len(names) < len(outputs):
        raise InvalidParameter("an output is asked for twice")
    for output in outputs:
        if output.name not in available:
            require_classes(info.config)
            if output.name in _OF_MAPS and not methods_of(info.config):
                parse_maps(info.config, info.labels)  # raises what the model is instead
            raise InvalidParameter(
                f"output {output.name!r:.80}: the model has {', '.join(available)}"
            )
        if "classification" in output.parameters and output.name != "score":
            raise InvalidParameter("the parameter 'classification' is for the output 'score'")
    return names


def _map_method(parameters: Mapping[str, Any], names: set[str], config: NetworkConfig) -> str:
    """Return the method of the output `attention`: by default relevance where the model has it."""
    methods = [method for method in methods_of(config) if method in _MAPS] or list(_MAPS)
    method = parameters.get("attention", methods[0])
    if not isinstance(method, str) or method not in methods:
        raise InvalidParameter(f"attention {method!r:.80}: expected one of {', '.join(methods)}")
    if "evidence" in names and method != "relevance":
        raise InvalidParameter(f"output 'evidence': a map of attention {method!r} is of no class")
    return method


def _top_k(parameters: Mapping[str, Any], outputs: Sequence[RequestedOutput], classes: int) -> int:
    """Return how many classes any output needs; raises `InvalidParameter`."""
    asked = [("top_k", parameters), *(("classification", output.parameters) for output in outputs)]
    counts = [(name, each[name]) for name, each in asked if each.get(name) is not None]
    for name, count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= classes:
            allowed = (
                f"expected 1 to {classes}" if classes else "there are no classes and no labels"
            )
            raise InvalidParameter(f"{name} {count!r:.40}: {allowed}")
    return max((count for _, count in counts), default=min(DEFAULT_TOP_K, max(classes, 1)))


async def read(
    admitted: AdmittedRequest, body: bytearray, decode: Callable[[bytearray], InferenceRequest]
) -> Inference:
    """Return what a body asks of the request's model; its bytes are dropped as soon as they are
    copied.

    A thread reads a large one. Raises as `Inference.of`, and what `decode` raises.
    """
    info, limit = admitted.model.info, admitted.service.settings.max_images_per_request

    def work() -> Inference:
        request = decode(body)
        asked = Inference.of(request, info, limit=limit)
        if isinstance(asked.pictures, list) and body is not asked.pictures[0]:
            body.clear()  # pixels are a view of it
        return asked

    return await admitted.write(work, size=len(body) // BYTES_A_VALUE)


async def infer(
    admitted: AdmittedRequest,
    asked: Inference,
    encode: Callable[[str, str | None, Sequence[OutputTensor]], T],
) -> T:
    """Compute the pictures of a request, which take their places first, and return its encoded
    answer.

    `encode` runs on a thread where there are many values.

    Raises:
        QueueFull: there are not as many places as pictures.
        ImageError, ServiceError: of the first picture that failed, its position named if there are
        several.
    """
    info = admitted.model.info
    await admitted.take(len(asked.pictures))
    results = await of_each(partial(_compute, admitted, asked), list(asked.pictures))
    for result in results:
        admitted.count_image(info.name, result.outputs if info.config.num_classes else None)

    def answer() -> T:
        return encode(info.name, asked.id, make_outputs(results, asked, info.labels))

    return await admitted.write(answer, size=asked.size(info))


async def _compute(
    admitted: AdmittedRequest, asked: Inference, picture: bytearray | NDArray[np.uint8]
) -> InferenceResult:
    """Return the result of one of the pictures; raises as `infer`."""
    limit = admitted.service.settings.max_upload_bytes
    if not isinstance(picture, bytearray):
        return await infer_pixels(admitted, picture, asked.requested)
    if len(picture) > limit:
        raise UploadTooLarge(
            f"{len(picture)} bytes: at most {limit} are allowed (VIT_MAX_UPLOAD_BYTES)"
        )
    return (await infer_file(admitted, picture, asked.requested))[1]


def make_outputs(
    results: Sequence[InferenceResult], asked: Inference, labels: Sequence[str]
) -> list[OutputTensor]:
    """Return the selected outputs: [N, K], [N, C] of logits, [N, rows, columns] of attention, [N,
    D].
    """
    labels = asked.requested.labels or labels

    def stacked(name: str, count: int | None = None) -> NDArray[Any]:
        values = (OUTPUTS[name].values(result.outputs, labels) for result in results)
        return np.stack([each[:count] for each in values if each is not None])

    outputs: list[OutputTensor] = []
    for output in asked.outputs:
        count = output.parameters.get("classification")
        if count is None:
            values = stacked(output.name)
        else:
            values = _classification(
                *(stacked(name, count) for name in ("score", "index", "label"))
            )
        outputs.append(
            OutputTensor(
                output.name, values, bool(output.parameters.get("binary_data", asked.binary))
            )
        )
    return outputs


def _classification(
    score: NDArray[np.float32], index: NDArray[np.int64], label: NDArray[np.object_]
) -> NDArray[np.object_]:
    """Return `value:index:label` [N, K].

    https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_classification.md
    """
    rows = zip(score.tolist(), index.tolist(), label.tolist(), strict=True)
    return np.array(
        [
            [f"{value:f}:{number}:{name}" for value, number, name in zip(*row, strict=True)]
            for row in rows
        ],
        object,
    )
