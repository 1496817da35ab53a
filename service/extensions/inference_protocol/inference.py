"""The path of an inference request: check the inputs, compute the pictures, select the outputs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig
from model.label_texts import labels_of_request, with_labels
from model.outputs import DEFAULT_TOP_K, RequestedOutputs
from model.parameters import methods_of, parse_embedding, parse_maps, require_classes
from service.engine.messages import InferenceResult, ModelInfo
from service.errors import (
    InvalidParameter,
    MalformedRequest,
    NotFound,
    TooManyImages,
    UploadTooLarge,
)
from service.extensions.inference_protocol import VERSION
from service.extensions.inference_protocol.outputs import OUTPUTS, inputs_of, outputs_of
from service.extensions.inference_protocol.tensors import (
    InferenceRequest,
    OutputTensor,
    RequestedOutput,
)
from service.web.admit import AdmittedRequest
from service.web.gather import of_each
from service.web.json_bodies import require_known
from service.web.picture import infer_file, infer_pixels

T = TypeVar("T")

Pictures = list[bytearray] | NDArray[np.uint8]
"""Pictures of a request: encoded files, or pixels uint8 [N, H, W, C] of the model's size."""


_BY_DEFAULT: Final[tuple[str, ...]] = ("label", "index", "score")
_OF_CLASSES: Final = frozenset({*_BY_DEFAULT, "logits"})
_OF_MAPS: Final = frozenset({"attention", "evidence"})
# Parameters of a request, and the outputs that each affects; an empty set affects all.
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
# Longest id of a request. Its answer repeats it, and no limit counts the bytes of waiting answers.
_MAX_ID_CHARACTERS: Final = 1024
# Bytes of base64 that take as long to read as one number.
BYTES_A_VALUE: Final = 256
RIGHT_CALL: Final = "in JSON as base64, else raw"
"""How to send a picture in a tensor, for messages about other contents."""

# Methods of the output `attention`.
_MAPS: Final = ("cls", "relevance")


def check_version(version: str) -> None:
    """Raise `NotFound` unless models have this version."""
    if version not in ("", VERSION):
        raise NotFound(f"version {version!r:.40}: the model has {VERSION} only")


@dataclass(frozen=True)
class Inference:
    """A checked request to one model.

    Attributes:
        outputs: selected outputs with their parameters, in the order of the answer.
        requested: outputs that the engine computes for each picture.
        binary: whether to send outputs as bytes, unless their own parameters say otherwise.
    """

    id: str | None
    pictures: Pictures
    outputs: Sequence[RequestedOutput]
    requested: RequestedOutputs
    binary: bool

    @classmethod
    def of(cls, request: InferenceRequest, info: ModelInfo, *, limit: int) -> Self:
        """Check a request to a model, and return its pictures and selected outputs.

        Args:
            limit: largest number of pictures.

        Raises:
            InvalidParameter, InputError: an input, output or parameter is unknown, or does not
                apply to the model.
            TooManyImages: the request has too many pictures; none is read.
            MalformedRequest: see `tensors`.
        """
        _check_parameters(request)
        pictures = _pictures(request, info, limit)
        if len(request.id or "") > _MAX_ID_CHARACTERS:
            raise InvalidParameter(
                f"the id has {len(request.id or '')} characters: "
                f"at most {_MAX_ID_CHARACTERS} are allowed"
            )
        if len(pictures) == 0:
            raise InvalidParameter(
                "the request has no picture: send one or more in the input 'image' or 'pixels'"
            )
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
        """Return the number of values in all outputs together."""
        shapes = (OUTPUTS[output.name].shape(info) for output in self.outputs)
        values = sum(
            math.prod(self.requested.top_k if side == -1 else side for side in shape)
            for shape in shapes
        )
        return len(self.pictures) * values


def _check_parameters(request: InferenceRequest) -> None:
    """Raise `InvalidParameter` for an unknown parameter, or a flag without a boolean value."""
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
    """Return the pictures of a request; raises the errors of `Inference.of`."""
    if len(request.inputs) != 1:
        raise InvalidParameter(f"{len(request.inputs)} inputs: expected one, 'image' or 'pixels'")
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
        raise InvalidParameter(
            f"input {tensor.name!r} is {datatype} of shape [{shape}], "
            f"not {tensor.datatype:.20} of {tensor.shape!s:.80}"
        )
    return tensor.files() if datatype == "BYTES" else tensor.pixels()


def _requested(
    parameters: Mapping[str, Any], outputs: Sequence[RequestedOutput], info: ModelInfo
) -> RequestedOutputs:
    """Return the outputs that the engine computes; raises the errors of `Inference.of`."""
    names = _names(outputs, info)
    text = parameters.get("labels")
    labels: tuple[str, ...] = ()
    if text is not None or names & _OF_CLASSES:
        labels = labels_of_request(text, info.zero_shot, info.config)
    config = with_labels(info.config, labels)
    pool = parameters.get("pool", "head")
    if labels and pool != "head":
        raise InvalidParameter(
            "pool: does not apply together with labels, which are compared with the features"
        )
    method = _map_method(parameters, names, config)
    embedding = parse_embedding(info.config, pool, parameters.get("normalize", False))
    for name, affected in _PARAMETERS.items():
        if affected and parameters.get(name) is not None and not names & affected:
            wanted = " or ".join(sorted(affected))
            raise InvalidParameter(
                f"{name}: does not apply to these outputs; select the output {wanted}"
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
    """Return the names of outputs.

    Raises:
        InvalidParameter, InputError: the model does not have the output.
    """
    available = outputs_of(info)
    names = {output.name for output in outputs}
    if len(names) < len(outputs):
        raise InvalidParameter("an output is selected twice: select it once")
    for output in outputs:
        if output.name not in available:
            require_classes(info.config)
            if output.name in _OF_MAPS and not methods_of(info.config):
                parse_maps(info.config, info.labels)  # raises an error that describes the model
            raise InvalidParameter(
                f"output {output.name!r:.80}: the model has {', '.join(available)}"
            )
        if "classification" in output.parameters and output.name != "score":
            raise InvalidParameter("the parameter 'classification' is for the output 'score'")
    return names


def _map_method(parameters: Mapping[str, Any], names: set[str], config: NetworkConfig) -> str:
    """Return the method of the output `attention`; the default is the model's first one."""
    methods = [method for method in methods_of(config) if method in _MAPS] or list(_MAPS)
    method = parameters.get("attention", methods[0])
    if not isinstance(method, str) or method not in methods:
        raise InvalidParameter(f"attention {method!r:.80}: expected one of {', '.join(methods)}")
    if "evidence" in names and method != "relevance":
        raise InvalidParameter(
            f"output 'evidence': a map of attention {method!r} does not depend on a class"
        )
    return method


def _top_k(parameters: Mapping[str, Any], outputs: Sequence[RequestedOutput], classes: int) -> int:
    """Return how many classes the outputs have.

    Raises:
        InvalidParameter: a number is wrong.
        MalformedRequest: `top_k` and `classification` have different numbers.
    """
    values = [("top_k", parameters.get("top_k"))]
    values += [("classification", output.parameters.get("classification")) for output in outputs]
    counts: list[tuple[str, Any]] = [(name, count) for name, count in values if count is not None]
    for name, count in counts:
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= classes:
            allowed = (
                f"expected an integer from 1 to {classes}"
                if classes
                else "the model has neither classes nor labels"
            )
            raise InvalidParameter(f"{name} {count!r:.40}: {allowed}")
    if len({count for _, count in counts}) > 1:
        stated = " and ".join(f"{name} {count}" for name, count in counts)
        raise MalformedRequest(f"{stated} differ: send one of them")
    return counts[0][1] if counts else min(DEFAULT_TOP_K, max(classes, 1))


async def read(
    admitted: AdmittedRequest, body: bytearray, decode: Callable[[bytearray], InferenceRequest]
) -> Inference:
    """Return the request in a body; raises the errors of `decode` and of `Inference.of`.

    A thread reads a large body. The bytes are dropped as soon as the pictures are copied.
    """
    info = admitted.model.info
    limit = admitted.service.settings.max_images_per_request

    def work() -> Inference:
        request = decode(body)
        inference = Inference.of(request, info, limit=limit)
        if isinstance(inference.pictures, list) and body is not inference.pictures[0]:
            body.clear()  # an array of pixels would be a view of the body
        return inference

    return await admitted.convert(work, size=len(body) // BYTES_A_VALUE)


async def infer(
    admitted: AdmittedRequest,
    inference: Inference,
    encode: Callable[[str, str | None, Sequence[OutputTensor]], T],
) -> T:
    """Take a slot for each picture, compute the pictures, and return the encoded answer.

    Args:
        encode: encodes the answer; it runs on a thread if the answer has many values.

    Raises:
        QueueFull: the service has too few free slots.
        ImageError, ServiceError: error of the first failed picture; names its position if there are
            several pictures.
    """
    info = admitted.model.info
    admitted.right_call = RIGHT_CALL
    await admitted.take_slots(len(inference.pictures))
    results = await of_each(partial(_compute, admitted, inference), list(inference.pictures))
    for result in results:
        admitted.count_image(info.name, result.outputs if info.config.num_classes else None)

    def answer() -> T:
        return encode(info.name, inference.id, make_outputs(results, inference, info.labels))

    return await admitted.convert(answer, size=inference.size(info))


async def _compute(
    admitted: AdmittedRequest, inference: Inference, picture: bytearray | NDArray[np.uint8]
) -> InferenceResult:
    """Return the result of one picture; raises the errors of `infer`."""
    limit = admitted.service.settings.max_upload_bytes
    if not isinstance(picture, bytearray):
        return await infer_pixels(admitted, picture, inference.requested)
    if len(picture) > limit:
        raise UploadTooLarge(
            f"{len(picture)} bytes: at most {limit} are allowed (VIT_MAX_UPLOAD_BYTES)"
        )
    return (await infer_file(admitted, picture, inference.requested))[1]


def make_outputs(
    results: Sequence[InferenceResult], inference: Inference, labels: Sequence[str]
) -> list[OutputTensor]:
    """Return the selected outputs as arrays whose first axis is the pictures."""
    labels = inference.requested.labels or labels

    def stacked(name: str) -> NDArray[Any]:
        values = (OUTPUTS[name].values(result.outputs, labels) for result in results)
        return np.stack([value for value in values if value is not None])

    outputs: list[OutputTensor] = []
    for output in inference.outputs:
        if output.parameters.get("classification") is None:
            values = stacked(output.name)
        else:
            values = _classification(*map(stacked, ("score", "index", "label")))
        is_binary = bool(output.parameters.get("binary_data", inference.binary))
        outputs.append(OutputTensor(output.name, values, is_binary))
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
