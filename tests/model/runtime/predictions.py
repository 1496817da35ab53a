"""The outputs of a predictor for a batch, as arrays."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.outputs import MapRequest, RequestedOutputs
from model.runtime.backend import CompileMode, Images
from model.runtime.batch_request import BatchRequest
from model.runtime.predictor import Predictor

MODES: Final[dict[str, CompileMode]] = {"openvino": "auto", "torch": "off"}
"""Compile modes by the library that they select on a CPU."""


class Predictions(NamedTuple):
    """The outputs of a batch's images: the fields of `model.outputs.Outputs`, stacked."""

    scores: NDArray[np.float32]
    indices: NDArray[np.int64]
    finite: NDArray[np.bool_]
    maps: list[Any]
    logits: Any


def predict(
    predictor: Predictor,
    images: Images,
    *,
    top_k: int,
    maps: Sequence[MapRequest | None] = (),
    logits: bool = False,
) -> Predictions:
    """Request the same outputs of all images, except for their maps."""
    requests = [RequestedOutputs(top_k, wanted, logits) for wanted in maps or [None] * len(images)]
    outputs = predictor.predict(images, requests)
    return Predictions(
        np.stack([each.scores for each in outputs]),
        np.stack([each.indices for each in outputs]),
        np.array([each.finite for each in outputs]),
        [each.map for each in outputs],
        np.stack([each.logits for each in outputs if each.logits is not None]) if logits else None,
    )


def logits_of(predictor: Predictor, images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the backend's logits of any number of images: float32 [B, num_classes]."""
    outputs = predictor._backend.predict(images, BatchRequest(logits=True))
    logits: NDArray[np.float32] = outputs["logits"]
    return logits
