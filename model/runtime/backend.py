"""The interface between the predictor and the backends, which run the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.errors import DeviceError
from model.outputs import MapRequest
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.compilation import Compilation

Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""A batch: uint8 [B, H, W, C], or B of uint8 [H, W, C] that lie anywhere."""

_TOLERANCES: Final = {"logits": (1e-3, 0.1), "attention": (0.01, 0.3), "relevance": (0.05, 0.5)}
"""Largest norm of the difference between two ways of computing an output, relative to the output's own norm: in
float32, and in dtypes of fewer bits. A way that lost something is off by its own norm. ViT-Ti/16 in bfloat16 is off by
0.01, and by 0.1 in relevance, which is a difference of large numbers."""


class Backend(Protocol):
    """Runs the network on its device; images are uint8 [B, H, W, C] in host memory.

    Attributes:
        name: the library that runs the network, with its version.
        compilation: whether the network is compiled, or why it is not.
        batch_sizes: the only sizes launched, smaller batches being padded up; None when any size is.
    """

    name: str
    compilation: Compilation
    batch_sizes: tuple[int, ...] | None

    def predict(self, images: Images, request: BatchRequest) -> BatchOutputs:
        """Return what is asked of a batch, or more, in host memory.

        It is called by as many threads at once as there are streams.

        Raises:
            RuntimeError: as the library raises it (out of memory, a device fault).
        """

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[Tensor, Tensor]:
        """Return `model.explanation.methods.explain` of a batch, in host memory; always torch's.

        It may be called by one more thread than `predict`, and outside of inference mode only.

        Raises:
            RuntimeError: as torch raises it.
        """

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        """Return the logits of a batch, before the temperature: [B, num_classes] on the device."""

    def exercise(self, sizes: Sequence[int]) -> None:
        """Run batches of noise and black of these sizes, with and without the last layer's attention row.

        Raises:
            NotFinite: the model gives scores that are not finite.
            RuntimeError: as the library raises it.
        """

    def fill_caches(self, size: int) -> None:
        """Run batches of this size wherever they may run later, so that what is kept for a size is there by then.

        Raises:
            DeviceError: the model gives scores that are not finite.
            RuntimeError: as the library raises it.
        """

    def compile(self) -> None:
        """Compile as the settings ask for, at once or in the background; `compilation` tells a failure."""


def stacked(images: Images) -> NDArray[np.uint8]:
    """Return a batch as one array, uint8 [B, H, W, C]."""
    return images if isinstance(images, np.ndarray) else np.stack(images)


def require_close(outputs: BatchOutputs, expected: BatchOutputs, *, exact: bool, source: str) -> None:
    """Check the network's outputs for a batch against torch's own.

    Args:
        outputs: on the host, computed by `source`.
        expected: on the host, of the same images and perhaps more.
        exact: whether both were computed in float32.

    Raises:
        DeviceError: one that `_TOLERANCES` names is further away than it allows.
    """
    theirs = expected.tensors()
    for name, output in outputs.tensors().items():
        if name in _TOLERANCES and name in theirs:
            reference = theirs[name][: len(output)].float()
            # A head that is all zeros gives zeros in both.
            relative = float((output.float() - reference).norm() / reference.norm().clamp_min(1e-6))
            if not relative <= _TOLERANCES[name][not exact]:
                raise DeviceError(f"{source}'s {name} are {relative:.2g} of their norm away from torch's")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
