"""The backend that runs the network in torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from model.outputs import MapRequest
from model.runtime.backend import trial_images
from model.runtime.batches import SIZES, BatchRequest, HostOutputs, Images, compute_in_pieces, stacked, with_best
from model.runtime.compilation import Network, compiled_network
from model.runtime.cpu import ThreadPolicy, keep_freed_memory
from model.runtime.torch_backend import TorchBackend, TorchOptions
from model.runtime.torch_pass import on_host


class TorchCpu(TorchBackend):
    """Torch on the CPU.

    The process's heap is told to keep what a pass frees: see `keep_freed_memory`.
    """

    def __init__(self, options: TorchOptions, threads: ThreadPolicy) -> None:
        super().__init__(options)
        keep_freed_memory()
        self.largest_tried = SIZES[-1]  # larger ones are cut
        self.threads = threads
        self._head = options.head
        self._compiled: Network | None = None

    @torch.inference_mode()
    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        network: Network = self.network
        sizes: Sequence[int] = range(1, SIZES[-1] + 1)
        if self._compiled is not None and request.of_network in self.usual:
            network, sizes = self._compiled, SIZES
        with self.threads as alone:
            torch.set_num_threads(self.threads.count if alone else 1)  # of the calling thread
            outputs = compute_in_pieces(
                stacked(images), lambda piece: on_host(network(self.upload(piece), request)), sizes
            )
            return with_best(outputs, self._head, request.top_k)

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`; it takes one thread, and leaves the others to the batches that are classified."""
        with self.threads:
            torch.set_num_threads(1)  # of the calling thread
            return super().explain(images, targets, request)

    def _take_compiled(self) -> None:
        compiled = compiled_network(self._plain, self._normalise, self._folded, any_batch=False)
        for size in reversed(SIZES):
            for request in self.usual:
                compiled(self.upload(trial_images(self.config, size)), request)
        self._compiled = compiled
