"""Launching of batches on a device: pinned memory, uploads beside the computation, captured graphs.

    thread A   pinned <- images | upload ........ |          wait ........ | answer
    thread B                    pinned <- images  | upload (while A computes) ...
    device                       copy stream A    | graph A | graph B      |

Each caller has a slot of its own (pinned memory, device memory, copy stream), so that one batch's
upload runs while another computes. All computation is put on one stream under one lock: graphs
share their memory, and two of them never run at the same time. Nobody waits for the device while
holding the lock.

Nothing here is particular to CUDA; `model.runtime.cuda.ops` holds what is.
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
from model.runtime.backend import BatchRequest, Images

# (uint8 [B, H, W, C] on the device, request) -> the outputs there, by the names of `BatchOutputs`.
Compute = Callable[[Tensor, BatchRequest], dict[str, Tensor]]

# Outputs that every pass gives, and that come to the host only where they are asked for.
_ON_REQUEST: Final = frozenset({"logits", "head", "cls", "mean", "transfer"})


class DeviceOps(Protocol):
    """The operations of a device that a launcher needs.

    Attributes:
        device: the device that tensors are made on.
    """

    device: torch.device

    def stream(self) -> Any:
        """Return a queue of work for batches, opaque to the launcher; other models may be given the
        same one.
        """

    def capture_stream(self) -> Any:
        """Return a queue of work that no batch of any model runs on, and no other model captures
        on.

        Raises:
            DeviceError: there are no more.
        """

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which this thread's work goes to the stream."""

    def event(self) -> Any:
        """Return a new event, a point in a stream's work, with the methods of `torch.cuda.Event`."""

    def pinned(self, shape: Sequence[int]) -> Tensor:
        """Return uint8 zeros in host memory that the device reads by itself."""

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy on the host, complete when the current stream has come that far."""

    def capture(self, work: Callable[[], None], stream: Any) -> Callable[[], None]:
        """Run the work, record it, and return a function that runs it again on the same memory.

        After a failure the process can capture no more, and what it allocates is not to be relied
        on.
        """

    def synchronize(self) -> None:
        """Block until the device has nothing under way, or has failed."""


class CaptureFailed(RuntimeError):
    """The capture of a graph broke off, which leaves torch's allocator in a state that asserts
    later.
    """


class _Slot(NamedTuple):
    pinned: Tensor
    pixels: Tensor
    copies: Any
    uploaded: Any
    finished: Any


class _Graph(NamedTuple):
    """A recorded batch, and the tensors that it writes: whoever holds them keeps their memory from
    other graphs.
    """

    replay: Callable[[], None]
    outputs: dict[str, Tensor]


class BatchLauncher:
    """Runs batches of uint8 images through `compute` on a device.

    Args:
        compute: called on the launcher's stream, by one thread at a time, for batches without a
        graph.
        shape: (H, W, C) of an image.
        slots: callers served at the same time; further ones wait.

    Raises:
        RuntimeError: as torch raises it (out of memory).
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
        # Graphs read from here whichever slot the images came through. A copy within the device is
        # cheap: 9.6 MB (64 images of 224 pixels) at 4 TB/s are microseconds, while a graph for each
        # slot would double their number. It is an inference tensor, as all that is made of it: a
        # compiler makes other code for each of the two kinds.
        with torch.inference_mode():
            self._input = torch.zeros((max_batch, *shape), dtype=torch.uint8, device=ops.device)
        self._graphs: dict[tuple[int, BatchRequest], _Graph] = {}
        self._slots: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for _ in range(slots):
            pinned = ops.pinned((max_batch, *shape))
            pixels = torch.empty_like(self._input)
            self._slots.put(_Slot(pinned, pixels, ops.stream(), ops.event(), ops.event()))
        # Host memory that is freed, at any moment and by any thread, records an event on the stream
        # that it was downloaded on. So nothing is captured on the stream of the batches; all graphs
        # share their memory, and torch wants one stream for them. Nothing else runs there: the
        # workspaces of the products, which a graph keeps the addresses of, are then taken from the
        # graphs' memory, and stay (pytorch/pytorch#193402).
        self._captures: Any = None
        ops.synchronize()  # the streams above do not wait for what was made before them

    @torch.inference_mode()
    def capture(
        self, compute: Compute, sizes: Sequence[int], requests: Sequence[BatchRequest]
    ) -> None:
        """Record a graph of `compute` for each batch size and request; batches may run meanwhile,
        with a `compute`.

        Raises:
            CaptureFailed: a capture broke off; see `DeviceOps.capture`.
            DeviceError: see `DeviceOps.capture_stream`.
            RuntimeError: as torch raises it.
        """
        if self._captures is None:
            self._captures = self._ops.capture_stream()
        # The largest first: the smaller ones find their memory in what it has left.
        for size in sorted(sizes, reverse=True):
            for request in requests:
                self._graphs[size, request] = self._capture(compute, size, request)
        self._ops.synchronize()  # batches are computed on another stream

    def forget_graphs(self) -> None:
        """Compute every batch without a graph from now on."""
        self._graphs.clear()

    def _capture(self, compute: Compute, size: int, request: BatchRequest) -> _Graph:
        pixels, outputs = self._input[:size], dict[str, Tensor]()

        def work() -> None:
            outputs.update(compute(pixels, request))

        # What libraries set up at their first calls cannot be captured.
        with self._lock, self._ops.on(self._stream):
            work()
        self._ops.synchronize()
        with self._ops.on(self._captures):
            try:
                graph = _Graph(self._ops.capture(work, self._captures), outputs)
            except Exception as error:  # noqa: BLE001  whatever it was, the allocator is left as it is
                # A capture that broke off fails once more when it is ended: what failed first is
                # the context.
                cause = error.__context__ or error
                raise CaptureFailed(
                    f"the capture of {size} images failed: {first_line(cause)}"
                ) from cause
        # On the stream of the batches: graphs share their memory, and one of another launch may be
        # running.
        with self._lock, self._ops.on(self._stream):
            for tensor in outputs.values():
                tensor.zero_()  # so that a graph which does nothing has no answer
        self._ops.synchronize()  # the next one reads the same images, on another stream
        return graph

    @torch.inference_mode()
    def run(
        self, images: Images, request: BatchRequest, *, size: int, compute: Compute | None = None
    ) -> dict[str, Tensor]:
        """Compute one batch; callable by several threads at once.

        Args:
            images: B images, each uint8 [H, W, C].
            size: how many to launch, B ... max_batch; what the rows beyond B hold is of no account.
            compute: what computes it instead of its graph, or of the launcher's own where it has no
            graph.

        Returns:
            On the host, by name: what every request gets, and what this one asks for.

        Raises:
            RuntimeError: as torch raises it.
        """
        slot = self._slots.get()
        try:
            return self._run(slot, images, request, size, compute)
        except BaseException:
            # Nothing of this batch may still be read or written when its slot goes to another.
            self._ops.synchronize()
            raise
        finally:
            self._slots.put(slot)

    def _run(
        self, slot: _Slot, images: Images, request: BatchRequest, size: int, compute: Compute | None
    ) -> dict[str, Tensor]:
        ops, count = self._ops, len(images)
        graph = self._graphs.get((size, request.computed)) if compute is None else None
        unwanted = _ON_REQUEST - {*request.embeddings, *(["logits"] if request.logits else [])}
        with ops.on(slot.copies):
            np.stack(
                list(images), out=slot.pinned[:count].numpy()
            )  # the images' only copy on the host
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
                name: ops.download(each[:count])
                for name, each in outputs.items()
                if name not in unwanted
            }
            slot.finished.record(self._stream)
        slot.finished.synchronize()
        return host
