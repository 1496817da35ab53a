"""The inputs and outputs of a model: names, datatypes, shapes, and how to read the values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from model.config import ViTConfig
from model.outputs import Outputs, embedding_width
from model.parameters import methods_of
from service.engine.messages import ModelInfo


@dataclass(frozen=True)
class Output:
    """An output that a request may select.

    Attributes:
        shape: returns the shape for one picture; -1 means `top_k`.
        values: returns the values for one picture, from its outputs and the labels of its classes;
            None if they were not computed.
        exists: returns whether a model has this output.
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
    if outputs.map is None or outputs.map.evidence is None:
        return None
    return np.array([outputs.map.evidence], np.float32)


OUTPUTS: Final[Mapping[str, Output]] = {
    "label": Output(
        "BYTES",
        lambda info: [-1],
        lambda outputs, labels: np.array(
            [labels[index] for index in outputs.indices.tolist()], object
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


def outputs_of(info: ModelInfo) -> Mapping[str, Output]:
    """Return the outputs of a model by name."""
    return {name: output for name, output in OUTPUTS.items() if output.exists(info)}


def inputs_of(info: ModelInfo) -> dict[str, tuple[str, list[int]]]:
    """Return datatype and shape of a model's inputs by name; -1 is a size that requests choose."""
    return {"image": ("BYTES", [-1]), "pixels": ("UINT8", [-1, *info.input_shape])}
