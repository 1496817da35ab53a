"""Int8: whether a checkpoint is served in it, and what its answers are compared with.

`vitserve convert --dtype int8` says how each product is computed: see `model.runtime.openvino.quantization`.
"""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from model.checkpoint import Checkpoint
from model.errors import CheckpointError, DeviceError
from model.runtime.backend import CompileMode, Logits
from model.runtime.cpu import cpu_has_int8
from model.runtime.float8 import calibration_images
from model.runtime.openvino.backend import unsupported_reason
from model.runtime.openvino.int8_record import has_record, read_record
from model.runtime.openvino.quantization import Quantised
from model.runtime.postprocess import one_thread
from model.runtime.torch_backend import Normalise

logger = logging.getLogger(__name__)

_TRIED: Final = 4
"""Views of the photographs that vitserve brings along, on which a start looks whether int8 works here."""

_LEAST_CORRELATION: Final = 0.7
"""Of an image's logits with those in float32; wrong ranges leave none. DeiT-tiny's in int8 are above 0.97."""


class Int8(NamedTuple):
    """How products are computed in int8, by their names, and how often that agrees with float32."""

    products: dict[str, Quantised]
    agreement: str


def chosen_int8(
    checkpoint: Checkpoint, device: torch.device, dtype: str, backend: str, compile_mode: CompileMode, least: float
) -> Int8 | None:
    """Return what is recorded beside a checkpoint, where int8 is asked for, or possible with `auto`; else None.

    Raises:
        DeviceError: int8 is asked for, and is not possible, or agrees too seldom.
        CheckpointError: the record is damaged, or is not of this checkpoint; with `auto` as well.
    """
    if dtype not in ("auto", "int8") or (dtype == "auto" and not has_record(checkpoint)):
        return None
    if unsupported := unsupported_reason(str(device), "float32"):
        problem = f"it is OpenVINO's: {unsupported}"
    elif backend == "torch" or compile_mode in ("on", "max"):
        problem = "it is OpenVINO's: torch is to run the network"
    elif not cpu_has_int8():
        problem = "this CPU has no instructions for it, and is faster in float32"
    else:
        record = read_record(checkpoint)
        if record.agreement >= least:
            logger.info("int8 gives %s", record.text)
            return Int8(record.quantised, record.text)
        problem = f"it gives {record.text}, and {least:.2%} are required (VIT_AGREEMENT)"
    if dtype == "int8":
        raise DeviceError(f"dtype 'int8': {problem}: choose auto, which serves without int8")
    logger.warning("int8 is not used: %s", problem)
    return None


def torch_reference(checkpoint: Checkpoint) -> Logits:
    """Return what computes logits in float32, with torch and the checkpoint's tensors, on the calling thread alone."""
    model, normalise = checkpoint.network(), Normalise(checkpoint.preprocess)

    def logits(images: NDArray[np.uint8]) -> NDArray[np.float32]:
        with torch.inference_mode(), one_thread(torch.device("cpu")):
            found: NDArray[np.float32] = model(normalise(torch.from_numpy(images))).logits.numpy()
        return found

    return logits


def require_same_model(checkpoint: Checkpoint, logits: Logits, reference: Logits) -> None:
    """Raise CheckpointError if logits are not those of the checkpoint, rounding apart: its record has wrong ranges."""
    images = calibration_images(checkpoint.preprocess, _TRIED)
    ours, theirs = (each - each.mean(axis=1, keepdims=True) for each in (logits(images), reference(images)))
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    correlation = float(np.mean((ours * theirs).sum(axis=1) / np.maximum(norms, 1e-12)))
    if not correlation >= _LEAST_CORRELATION:
        raise CheckpointError(
            f"{checkpoint.source}: its logits in int8 correlate with float32's by "
            f"{correlation:.2f}, and {_LEAST_CORRELATION} is the least: convert it again"
        )
