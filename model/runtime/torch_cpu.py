"""The backend that runs the network in torch on the CPU."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.outputs import MapRequest
from model.runtime.backend import CompilationState
from model.runtime.batches import BatchRequest, HostOutputs, Images, compute_in_pieces, launch_size, stacked
from model.runtime.compilation import compiled_twin
from model.runtime.cpu import ThreadPolicy, keep_freed_memory
from model.runtime.postprocess import on_host, run_network
from model.runtime.scores import Scores
from model.runtime.torch_backend import TorchBackend, TorchOptions


class TorchCpu(TorchBackend):
    """Torch on the CPU; the compiler works in the background.

    The process's heap is told to keep what a pass frees: see `keep_freed_memory`.
    """

    def __init__(self, options: TorchOptions, threads: ThreadPolicy) -> None:
        super().__init__(options)
        keep_freed_memory()
        self.threads = threads
        self._scores = Scores(options.checkpoint)
        self._model = self._plain

    @torch.inference_mode()
    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        with self.threads as alone:
            torch.set_num_threads(self.threads.count if alone else 1)  # of the calling thread
            return self._scores(self._forward_in_pieces(stacked(images), request), request.top_k)

    def _forward_in_pieces(self, images: NDArray[np.uint8], request: BatchRequest) -> HostOutputs:
        if self.batch_sizes is not None:  # compiled: padded to one of few sizes
            return self.forward(images, request)
        return compute_in_pieces(images, lambda piece: self.forward(piece, request))

    def forward(self, images: NDArray[np.uint8], request: BatchRequest) -> HostOutputs:
        """Return the output of `run_network` for uint8 [B, H, W, C]; nobody waits for a compiler."""
        # The model is chosen first: if the compiled one takes over now, this batch is padded for nothing, no more.
        model, count = self._model if request.of_network in self.usual else self._plain, len(images)
        missing = launch_size(count, self.batch_sizes) - count
        if missing:
            images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
        output = run_network(model, self._normalise(self.upload(images)), request, self._folded)
        return on_host(output, count)

    @torch.inference_mode()
    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `Backend.logits`."""
        return self.forward(images, BatchRequest()).tensors()["logits"]

    def fill_caches(self, size: int) -> None:
        """See `Backend.fill_caches`."""
        self.exercise((size,))

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`; it takes one thread, and leaves the others to the batches that are classified."""
        with self.threads:
            torch.set_num_threads(1)  # of the calling thread
            return super().explain(images, targets, request)

    def compile(self) -> None:
        """Start compiling on a thread; the uncompiled model answers meanwhile."""
        if self.compilation.state is CompilationState.COMPILING:
            threading.Thread(target=self._compile, name="compile", daemon=True).start()

    def _compile_and_exercise(self) -> None:
        sizes = self._options.sizes
        twin = compiled_twin(self._plain)

        def logits(pixels: Tensor, request: BatchRequest) -> Tensor:
            return run_network(twin, self._normalise(pixels), request, self._folded).tensors()["logits"]

        self._exercise(logits, sizes)
        # In this order: a launch that reads the new sizes with the old model is padded for nothing, no more.
        self.batch_sizes = sizes
        self._model = twin
