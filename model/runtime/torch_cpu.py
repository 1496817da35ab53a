"""The backend that runs the network in torch on the CPU, the threads that compute a batch there, and their memory."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.outputs import MapRequest
from model.runtime.backend import Images, stacked
from model.runtime.batches import BatchOutputs, BatchRequest, compute_in_pieces, launch_size
from model.runtime.compilation import CompilationState, compiled_twin
from model.runtime.postprocess import run_network
from model.runtime.torch_backend import TorchBackend, TorchOptions

_TRIM_THRESHOLD: Final = -1
_MMAP_THRESHOLD: Final = -3
"""Parameters of `mallopt`: see mallopt(3)."""

_TUNABLES: Final = ("glibc.malloc.trim_threshold", "glibc.malloc.mmap_threshold")
_VARIABLES: Final = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}

_LARGEST_IN_HEAP: Final = 32 << 20
"""Bytes of a block that is not mapped by itself: the most that glibc takes, and what it comes to without this, too,
once a block of that size was freed."""

_KEPT: Final = 2 * _LARGEST_IN_HEAP
"""Bytes at the end of a heap that stay with the process; twice the largest block is glibc's own rule."""


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

    The process's heap is told to keep what a pass frees: see `keep_freed_memory`.
    """

    def __init__(self, options: TorchOptions, threads: ThreadPolicy) -> None:
        super().__init__(options)
        keep_freed_memory()
        self.threads = threads
        self._model = self._plain

    def predict(self, images: Images, request: BatchRequest) -> BatchOutputs:
        """See `Backend.predict`."""
        with self.threads:
            return self.postprocess(self._forward_in_pieces(stacked(images), request), request.top_k)

    def _forward_in_pieces(self, images: NDArray[np.uint8], request: BatchRequest) -> BatchOutputs:
        if self.batch_sizes is not None:  # compiled: padded to one of few sizes
            return self.forward(images, request)
        return compute_in_pieces(images, lambda piece: self.forward(piece, request))

    def forward(self, images: NDArray[np.uint8], request: BatchRequest) -> BatchOutputs:
        """Return the output of `run_network` for uint8 [B, H, W, C]; nobody waits for a compiler."""
        # The model is chosen first: if the compiled one takes over now, this batch is padded for nothing, no more.
        model, count = self._model if request.of_network in self.usual else self._plain, len(images)
        missing = launch_size(count, self.batch_sizes) - count
        if missing:
            images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
        output = run_network(model, self._normalise(self.upload(images)), request, self._folded)
        return output if not missing else output.first(count)

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        """See `Backend.logits`."""
        return self.forward(images, BatchRequest()).tensors()["logits"]

    def fill_caches(self, size: int) -> None:
        """See `Backend.fill_caches`."""
        self.exercise((size,))

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[Tensor, Tensor]:
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
        twin = compiled_twin(self._plain, autotune=self._options.compile_mode == "max")

        def logits(pixels: Tensor, request: BatchRequest) -> Tensor:
            return run_network(twin, self._normalise(pixels), request, self._folded).tensors()["logits"]

        self._exercise(logits, sizes)
        # In this order: a launch that reads the new sizes with the old model is padded for nothing, no more.
        self.batch_sizes = sizes
        self._model = twin


def keep_freed_memory() -> bool:
    """Let each heap of this process keep up to 64 MiB that it freed; return whether that was done.

    glibc gives freed memory back to the operating system at once when it is at the end of a heap or was a large block,
    and takes it again for the next pass: the kernel then clears thousands of pages for each batch. Networks of a few
    milliseconds an image spend an eighth of their time so.

    Each thread that computes has a heap. `malloc_trim` gives back what the first thread's keeps, not the others'. A C
    library that is not glibc is left as it is, and so is glibc where the environment sets its thresholds.
    """
    if any(name in os.environ.get("GLIBC_TUNABLES", "") for name in _TUNABLES) or not _VARIABLES.isdisjoint(os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP) and mallopt(_TRIM_THRESHOLD, _KEPT))
