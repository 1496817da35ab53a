"""The backend that runs the network in torch on a GPU, through the batch launcher and its captured graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import NewProcessNeeded
from model.runtime.backend import first_line, launch_size
from model.runtime.batch_launcher import CAPTURED_TOP_K, BatchLauncher, CaptureFailed, DeviceOps
from model.runtime.compilation import CompilationState
from model.runtime.device import batch_too_large
from model.runtime.postprocess import TopKOutput, pack, unpack
from model.runtime.torch_backend import TorchBackend, TorchOptions

logger = logging.getLogger(__name__)


class Cuda(TorchBackend):
    """Torch on a GPU: everything from normalisation to the top-k runs there, as one CUDA graph a launch size.

    Raises:
        DeviceError: not enough memory for the weights, or the images of the largest batch.
    """

    compiles_embedding = True

    def __init__(self, options: TorchOptions, ops: DeviceOps, *, streams: int) -> None:
        super().__init__(options)
        self._ops = ops
        shape, largest = (*self.config.image_size, self.config.in_channels), options.sizes[-1]
        try:
            self._launcher = BatchLauncher(ops, self._compute, shape=shape, max_batch=largest, slots=streams)
        except RuntimeError as error:  # of host memory that cannot be pinned, too
            raise batch_too_large(str(options.device), largest) from error

    def predict(self, images: NDArray[np.uint8], *, layers: tuple[int, ...], top_k: int) -> TopKOutput:
        """See `Backend.predict`; the output comes from the device in one piece."""
        size = launch_size(len(images), self.batch_sizes)
        packed, packed_k = self._launcher.run(images, size=size, layers=layers, top_k=top_k)
        output = unpack(packed, top_k=packed_k, layers=len(layers), heads=self.config.heads)
        return output._replace(scores=output.scores[:, :top_k], indices=output.indices[:, :top_k])

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`; batches go the way that requests go, and the smallest one straight to the model."""
        super().exercise(sizes[:1])
        for size in sizes:
            for turn, layers in enumerate(self.usual_layers):
                output = self.predict(self.trial_images(size, turn), layers=layers, top_k=1)
                self.require_finite(output.scores.masked_fill(~output.finite.unsqueeze(1), torch.nan))

    def _compute(self, pixels: Tensor, layers: tuple[int, ...], top_k: int) -> Tensor:
        """Map uint8 [B, H, W, C] on the device to packed output, int32 [B, width], there, with the uncompiled model.

        It is what runs where there is no graph: neither a compiler nor the set-up of lasting kernels is waited for.
        """
        return pack(self.postprocess(self._plain(self._plain_normalise(pixels), layers), top_k))

    def _compute_to_capture(self, pixels: Tensor, layers: tuple[int, ...], top_k: int) -> Tensor:
        """Do what `_compute` does, with the compiled model where there is one."""
        return pack(self.postprocess(self._model(self._normalise(pixels), layers), top_k))

    def compile(self) -> None:
        """Compile, and capture a graph of each launch size, before returning.

        Raises:
            NewProcessNeeded: a capture broke off.
            RuntimeError: the device failed meanwhile.
        """
        if self.compilation.state is CompilationState.COMPILING:
            with self._ops.lasting_kernels():
                self._compile()
        if not self._options.graphs:
            self.compilation = replace(self.compilation, graphs="CUDA graphs are off")
        elif self.compilation.state is not CompilationState.OFF:
            self.capture()
        # An error that was no reason to stop above may have left a device on which nothing runs any more.
        self.exercise((1,))

    def capture(self) -> None:
        """Turn each launch size into a graph, of the compiled model or, failing that, of the uncompiled one.

        Raises:
            NewProcessNeeded: a capture broke off.
            torch.OutOfMemoryError: the graphs do not fit.
        """
        started = time.monotonic()
        try:
            top_k = min(CAPTURED_TOP_K, self.config.num_classes)
            self._launcher.capture(self._compute_to_capture, self._options.sizes, self.usual_layers, top_k=top_k)
        except CaptureFailed as error:
            logger.error("no CUDA graphs: %s", error)
            raise NewProcessNeeded(f"{self._device}: {error}", "cuda_graphs", "off") from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.compilation = replace(self.compilation, graphs=f"no CUDA graphs: {first_line(error)}")
            logger.warning("no CUDA graphs: %s", first_line(error))
            return
        self.batch_sizes = self._options.sizes
        if self.compilation.state is not CompilationState.COMPILED:
            self.compilation = replace(self.compilation, graphs="CUDA graphs of the uncompiled model")
        self._log("captured", started)
