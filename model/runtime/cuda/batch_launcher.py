"""Launches batches on a device: pinned memory, overlapping uploads, captured graphs.

    thread A   pinned <- images | upload ........ |          wait ........ | answer
    thread B                    pinned <- images  | upload (while A computes) ...
    device                       copy stream A    | graph A | graph B      |

Each caller has its own slot (pinned memory, device memory, copy stream), so that the upload of one
batch overlaps the computation of another. All computation goes to one stream under one lock,
because graphs share their memory and must not run at the same time. No thread waits for the device
while it holds the lock.

This module does not depend on CUDA; `model.runtime.cuda.ops` does.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from model.errors import first_line
from model.runtime.backend import Images
from model.runtime.batch_request import BatchRequest

# (uint8 [B, H, W, C] on the device, request) -> outputs on the device, by their names.
Compute = Callable[[Tensor, BatchRequest], dict[str, Tensor]]

# Outputs that every pass gives, and that are copied to the host only on request.
_ON_REQUEST: Final = frozenset({"logits", "head", "cls", "mean", "transfer"})


class DeviceOps(Protocol):
    """The operations of a device that a launcher needs.

    Attributes:
        device: the device that tensors are made on.
    """

    device: torch.device

    def stream(self) -> Any:
        """Return a queue of work for batches, which other models may share.

        It is opaque to the launcher.
        """

    def capture_stream(self) -> Any:
        """Return a queue of work that is neither used for batches nor for other models' captures.

        Raises:
            DeviceError: all of these queues are taken.
        """

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work goes to the stream."""

    def event(self) -> Any:
        """Return a new event with the methods of `torch.cuda.Event`: a point in a stream's work."""

    def pinned(self, shape: Sequence[int]) -> Tensor:
        """Return uint8 zeros in host memory that the device can read directly."""

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, complete when the current stream reaches this point."""

    def capture(self, work: Callable[[], None], stream: Any) -> Callable[[], None]:
        """Run the work, record it, and return a function that replays it on the same memory.

        After a failure the process must not capture again, and its allocations are not reliable.
        """

    def synchronize(self) -> None:
        """Block until the device is idle, or has failed."""


class CaptureFailed(RuntimeError):
    """The capture of a graph failed; torch's allocator is left in a state that asserts later."""


class _Slot(NamedTuple):
    pinned: Tensor
    pixels: Tensor
    copies: Any
    uploaded: Any
    finished: Any


class _Graph(NamedTuple):
    """A recorded batch, and the tensors that it writes.

    A reference to the tensors keeps other graphs from using their memory.
    """

    replay: Callable[[], None]
    outputs: dict[str, Tensor]


class BatchLauncher:
    """Runs batches of uint8 images through `compute` on a device.

    Args:
        ops: the operations of the device.
        compute: computes batches without a graph, on the launcher's stream, by one thread at a
            time.
        shape: (H, W, C) of an image.
        max_batch: most images in a batch.
        slots: number of callers served at the same time; further ones wait.

    Raises:
        RuntimeError: from torch (out of memory).
    """

    def __init__(
        self,
        ops: DeviceOps,
        compute: Compute,
        *,
        shape: tuple[int, ...],
        max_batch: int,
        slots: int,
    ) -> None:
        self._ops = ops
        self._compute = compute
        self._stream = ops.stream()
        self._lock = threading.Lock()
        # All graphs read their images from here, whatever slot these came through. A graph for each
        # slot would double their number. A copy within the device is cheap: 9.6 MB (64 images of
        # 224 pixels) at 4 TB/s take microseconds. This and all tensors computed from it are
        # inference tensors, because a compiler makes separate code for other tensors.
        with torch.inference_mode():
            self._input = torch.zeros((max_batch, *shape), dtype=torch.uint8, device=ops.device)
        self._graphs: dict[tuple[int, BatchRequest], _Graph] = {}
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(slots):
            pinned = ops.pinned((max_batch, *shape))
            pixels = torch.empty_like(self._input)
            self._slots.put(_Slot(pinned, pixels, ops.stream(), ops.event(), ops.event()))
        # Captures have a stream of their own. Host memory that is freed, at any moment and by any
        # thread, records an event on the stream of its download, so the batches' stream cannot be
        # captured. All graphs share their memory, for which torch requires one stream. Nothing else
        # runs there, so that the workspaces of matrix products, whose addresses a graph keeps, come
        # from the graphs' memory and stay (pytorch/pytorch#193402).
        self._captures: Any = None
        ops.synchronize()  # the streams above do not wait for the tensors made before

    @torch.inference_mode()
    def capture(
        self, compute: Compute, sizes: Sequence[int], requests: Sequence[BatchRequest]
    ) -> None:
        """Record a graph of `compute` for each batch size and request.

        Batches with their own `compute` may run meanwhile.

        Raises:
            CaptureFailed: a capture failed; see `DeviceOps.capture`.
            DeviceError: see `DeviceOps.capture_stream`.
            RuntimeError: from torch.
        """
        if self._captures is None:
            self._captures = self._ops.capture_stream()
        # The largest first: smaller graphs reuse its free memory.
        for size in sorted(sizes, reverse=True):
            for request in requests:
                self._graphs[size, request] = self._capture(compute, size, request)
        self._ops.synchronize()  # batches are computed on another stream

    def forget_graphs(self) -> None:
        """Compute every batch without a graph from now on."""
        self._graphs.clear()

    def _capture(self, compute: Compute, size: int, request: BatchRequest) -> _Graph:
        pixels = self._input[:size]
        outputs: dict[str, Tensor] = {}

        def work() -> None:
            outputs.update(compute(pixels, request))

        # Libraries initialise themselves at their first calls, which cannot be captured.
        with self._lock, self._ops.on(self._stream):
            work()
        self._ops.synchronize()
        with self._ops.on(self._captures):
            try:
                graph = _Graph(self._ops.capture(work, self._captures), outputs)
            except Exception as error:  # noqa: BLE001  any error leaves the allocator unusable
                # A failed capture fails once more when it ends: the first error is the context.
                cause = error.__context__ or error
                raise CaptureFailed(
                    f"the capture of {size} images failed: {first_line(cause)}"
                ) from cause
        # On the batches' stream, because graphs share their memory and another may be running.
        with self._lock, self._ops.on(self._stream):
            for tensor in outputs.values():
                tensor.zero_()  # so that outputs of a graph that does nothing stay zero
        self._ops.synchronize()  # the next capture reads the same images on another stream
        return graph

    @torch.inference_mode()
    def run(
        self, images: Images, request: BatchRequest, *, size: int, compute: Compute | None = None
    ) -> dict[str, Tensor]:
        """Compute one batch; several threads may call this at once.

        Args:
            images: B images, each uint8 [H, W, C].
            request: the requested outputs.
            size: number of images to launch, B ... max_batch; rows beyond B are ignored.
            compute: function that computes the batch, instead of its graph or the launcher's
                `compute`.

        Returns:
            The outputs of every pass and the requested ones, on the host, by name.

        Raises:
            RuntimeError: from torch.
        """
        slot = self._slots.get()
        try:
            return self._run(slot, images, request, size, compute)
        except BaseException:
            # The device must finish this batch before another batch uses its slot.
            self._ops.synchronize()
            raise
        finally:
            self._slots.put(slot)

    def _run(
        self, slot: _Slot, images: Images, request: BatchRequest, size: int, compute: Compute | None
    ) -> dict[str, Tensor]:
        ops = self._ops
        count = len(images)
        graph = None
        if compute is None:
            graph = self._graphs.get((size, request.graph_part))
        unwanted = _ON_REQUEST.difference(request.embeddings)
        if request.logits:
            unwanted -= {"logits"}
        with ops.on(slot.copies):
            # The images' only copy on the host.
            np.stack(list(images), out=slot.pinned[:count].numpy())
            slot.pixels[:count].copy_(slot.pinned[:count], non_blocking=True)
            slot.uploaded.record(slot.copies)
        with self._lock, ops.on(self._stream):
            slot.uploaded.wait(self._stream)
            self._input[:count].copy_(slot.pixels[:count])
            if graph is not None:
                graph.replay()
                outputs = graph.outputs
            else:
                outputs = (compute or self._compute)(self._input[:size], request)
            host = {
                name: ops.download(tensor[:count])
                for name, tensor in outputs.items()
                if name not in unwanted
            }
            slot.finished.record(self._stream)
        slot.finished.synchronize()
        return host
