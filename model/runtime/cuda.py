"""The backend that runs the network in torch on a GPU, through the batch launcher and its captured graphs."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from model.errors import DeviceError
from model.runtime.backend import first_line, launch_size
from model.runtime.batch_launcher import CAPTURED_TOP_K, BatchLauncher, DeviceOps
from model.runtime.compilation import CompilationState
from model.runtime.postprocess import RELEVANCE, TopKOutput, pack, run_network, unpack
from model.runtime.torch_backend import TorchBackend, TorchOptions

logger = logging.getLogger(__name__)


class Cuda(TorchBackend):
    """Torch on a GPU: everything from normalisation to the top-k runs there, as one CUDA graph a launch size.

    Raises:
        DeviceError: not enough memory for the weights or the largest batch's images.
    """

    compiles_embedding = True

    def __init__(self, options: TorchOptions, ops: DeviceOps, *, streams: int) -> None:
        super().__init__(options)
        shape, largest = (*self.config.image_size, self.config.in_channels), options.sizes[-1]
        try:
            self._launcher = BatchLauncher(ops, self._compute, shape=shape, max_batch=largest, slots=streams)
        except RuntimeError as error:
            raise DeviceError(f"{options.device}: batches of {largest} do not fit: {first_line(error)}") from error

    def predict(self, images: NDArray[np.uint8], *, layers: tuple[int, ...], top_k: int) -> TopKOutput:
        """See `Backend.predict`; the output comes from the device in one piece."""
        size = launch_size(len(images), self.batch_sizes)
        packed, packed_k = self._launcher.run(images, size=size, layers=layers, top_k=top_k)
        wanted, config = RELEVANCE in layers, self.config
        output = unpack(
            packed,
            top_k=packed_k,
            layers=len(layers) - wanted,
            heads=config.heads,
            relevance=config.tokens if wanted else 0,
        )
        return output._replace(scores=output.scores[:, :top_k], indices=output.indices[:, :top_k])

    def _compute(self, pixels: Tensor, layers: tuple[int, ...], top_k: int) -> Tensor:
        """Map uint8 [B, H, W, C] on the device to packed output, int32 [B, width], there."""
        return pack(self.postprocess(run_network(self._model_for(layers), self._normalise(pixels), layers), top_k))

    def compile(self) -> None:
        """Compile, and capture a graph of each launch size, before returning."""
        if self.compilation.state is CompilationState.COMPILING:
            self._compile()
        if self.compilation.state is not CompilationState.OFF:
            self.capture()

    def capture(self) -> None:
        """Turn each launch size into a graph, of the compiled model or, failing that, of the uncompiled one."""
        started = time.monotonic()
        try:
            top_k = min(CAPTURED_TOP_K, self.config.num_classes)
            self._launcher.capture(self._options.sizes, self.usual_layers, top_k=top_k)
        except RuntimeError as error:
            self.compilation = replace(self.compilation, graphs=f"no CUDA graphs: {first_line(error)}")
            logger.warning("no CUDA graphs: %s", first_line(error))
            return
        self.batch_sizes = self._options.sizes
        if self.compilation.state is not CompilationState.COMPILED:
            self.compilation = replace(self.compilation, graphs="CUDA graphs of the uncompiled model")
        self._log("captured", started)
