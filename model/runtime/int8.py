"""Int8: whether the graph beside a checkpoint is served, and what its answers are compared with.

`vitserve convert --dtype int8` makes that graph: see `model.runtime.openvino.quantization`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from model.checkpoint import Checkpoint
from model.errors import CheckpointError, DeviceError
from model.runtime.backend import CompileMode, Reference
from model.runtime.float8 import calibration_images
from model.runtime.openvino.backend import unsupported_reason
from model.runtime.openvino.int8_files import has_int8, read_graph, read_record
from model.runtime.postprocess import one_thread
from model.runtime.torch_backend import Normalise

if TYPE_CHECKING:
    from model.runtime.openvino.network import NetworkGraph

logger = logging.getLogger(__name__)

_TRIED: Final = 4
"""Views of the photographs that vitserve brings along, on which a start looks whether the graph is of this model."""

_LEAST_CORRELATION: Final = 0.7
"""Of an image's logits with those in float32; another model's have none. DeiT-tiny's in int8 are above 0.97."""


class Int8(NamedTuple):
    """A graph in int8 that is to be served, and how often it agrees with float32."""

    graph: NetworkGraph
    agreement: str


def chosen_graph(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: str,
    backend: str,
    compile_mode: CompileMode,
    least: float,
) -> Int8 | None:
    """Return the graph in int8 beside a checkpoint, where it is asked for, or possible with `auto`; else None.

    Raises:
        DeviceError: int8 is asked for, and is not possible, or agrees too seldom.
        CheckpointError: the files are damaged, or are not of this checkpoint; with `auto` as well.
    """
    if dtype not in ("auto", "int8") or (dtype == "auto" and not has_int8(checkpoint)):
        return None
    unsupported = unsupported_reason(str(device), "float32")
    if unsupported is None and (backend == "torch" or compile_mode in ("on", "max")):
        unsupported = "torch is to run the network"
    if unsupported is not None:
        problem = f"it is OpenVINO's: {unsupported}"
    else:
        record = read_record(checkpoint)
        if record.agreement >= least:
            logger.info("int8 gives %s", record.text)
            return Int8(read_graph(checkpoint, record), record.text)
        problem = f"it gives {record.text}, and {least:.2%} are required (VIT_AGREEMENT)"
    if dtype == "int8":
        raise DeviceError(f"dtype 'int8': {problem}: choose auto")
    logger.warning("the graph in int8 is not used: %s", problem)
    return None


class TorchReference:
    """Computes logits in float32, with torch and the checkpoint's own tensors, on the calling thread alone."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model = checkpoint.network()
        self._normalise = Normalise(checkpoint.preprocess)

    @torch.inference_mode()
    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the logits of images uint8 [B, H, W, C]: float32 [B, classes]."""
        with one_thread(torch.device("cpu")):
            logits: NDArray[np.float32] = self._model(self._normalise(torch.from_numpy(images))).logits.numpy()
        return logits


def require_same_model(
    checkpoint: Checkpoint, logits: Callable[[NDArray[np.uint8]], NDArray[np.float32]], reference: Reference
) -> None:
    """Raise CheckpointError if logits are not those of the checkpoint, rounding apart."""
    images = calibration_images(checkpoint.preprocess, _TRIED)
    ours, theirs = (each - each.mean(axis=1, keepdims=True) for each in (logits(images), reference.logits(images)))
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    correlation = float(np.mean((ours * theirs).sum(axis=1) / np.maximum(norms, 1e-12)))
    if not correlation >= _LEAST_CORRELATION:
        raise CheckpointError(
            f"{checkpoint.source}: the logits of its graph in int8 correlate with the checkpoint's by "
            f"{correlation:.2f}, and {_LEAST_CORRELATION} is the least: convert it again"
        )
