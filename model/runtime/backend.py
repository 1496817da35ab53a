"""The interface between the predictor and the backends, which run the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.prediction import MapRequest
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.compilation import Compilation

Images = NDArray[np.uint8] | Sequence[NDArray[np.uint8]]
"""A batch: uint8 [B, H, W, C], or B of uint8 [H, W, C] that lie anywhere."""


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
        self, images: NDArray[np.uint8], classes: NDArray[np.int64], request: MapRequest
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


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
