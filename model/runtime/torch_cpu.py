"""The backend that runs the network in torch on the CPU, and how many threads compute a batch there."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.runtime.backend import Images, stacked
from model.runtime.compilation import CompilationState
from model.runtime.heap import keep_freed_memory
from model.runtime.pieces import compute_in_pieces
from model.runtime.postprocess import NetworkOutput, TopKOutput
from model.runtime.torch_backend import TorchBackend, TorchOptions


class ThreadPolicy:
    """Gives a batch all threads when it is alone, and one when others compute beside it.

    A batch on a single thread needs no barrier between operators, at which threads wait for each other longest when
    the machine is busy; a lone batch is done sooner with all `count` of them, None leaving torch's choice. As a
    context manager around the computation it sets the calling thread's number, and enters with whether it is alone.
    Explanations count as a batch, though they always take one thread.
    """

    def __init__(self, count: int | None) -> None:
        if count is not None:
            torch.set_num_threads(count)
        self.count = torch.get_num_threads()
        self._lock = threading.Lock()
        self._running = 0

    def __enter__(self) -> bool:
        with self._lock:
            self._running += 1
            alone = self._running == 1
        torch.set_num_threads(self.count if alone else 1)  # of the calling thread
        return alone

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1


class TorchCpu(TorchBackend):
    """Torch on the CPU; the compiler works in the background.

    The process's heap is told to keep what a pass frees: see `model.runtime.heap`.
    """

    def __init__(self, options: TorchOptions, threads: ThreadPolicy) -> None:
        super().__init__(options)
        keep_freed_memory()
        self.threads = threads

    def predict(self, images: Images, *, layers: tuple[int, ...], top_k: int, logits: bool = False) -> TopKOutput:
        """See `Backend.predict`."""
        with self.threads:
            return self.postprocess(self._forward_in_pieces(stacked(images), layers), top_k, logits=logits)

    def _forward_in_pieces(self, images: NDArray[np.uint8], layers: tuple[int, ...]) -> NetworkOutput:
        if self.batch_sizes is not None:  # compiled: padded to one of few sizes
            return self.forward(images, layers)
        return compute_in_pieces(images, lambda piece: self.forward(piece, layers))

    def fill_caches(self, size: int) -> None:
        """See `Backend.fill_caches`."""
        self.exercise((size,))

    def explain(self, images: NDArray[np.uint8], classes: NDArray[np.int64], method: str) -> tuple[Tensor, Tensor]:
        """See `Backend.explain`; it takes one thread, and leaves the others to the batches that are classified."""
        with self.threads:
            torch.set_num_threads(1)  # of the calling thread
            return super().explain(images, classes, method)

    def compile(self) -> None:
        """Start compiling on a thread; the uncompiled model answers meanwhile."""
        if self.compilation.state is CompilationState.COMPILING:
            threading.Thread(target=self._compile, name="compile", daemon=True).start()
