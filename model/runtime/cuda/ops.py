"""CUDA's streams, events, pinned memory and graphs for `model.runtime.cuda.batch_launcher`.

See https://docs.pytorch.org/docs/stable/notes/cuda.html (streams, pinned memory, CUDA graphs). This
needs a GPU; its tests are skipped without one.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ClassVar, Final
from weakref import WeakSet

import torch
from torch import Tensor

from model.errors import DeviceError

# Number of torch's streams of each priority, which it hands out in turn (pytorch/pytorch#173729).
_STREAMS_OF_A_PRIORITY: Final = 32
# The priority of capture streams. Batches run at priority 0, so no batch stream is ever a capture
# stream. Torch replays a graph's kernels at the priority of their capture
# (cudaGraphInstantiateFlagUseNodePriority), so graphs go before the passes of maps.
_CAPTURE_PRIORITY: Final = -1


class CudaOps:
    """The operations of one CUDA device; see `model.runtime.cuda.batch_launcher.DeviceOps`."""

    _lock = threading.Lock()
    # Waiting for a device while any stream captures breaks that capture off.
    _captures_or_waits = threading.RLock()
    _capture_streams: ClassVar[WeakSet[torch.cuda.Stream]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # cuDNN's attention builds a plan for each shape and thread, which takes 0.4 s. Before torch
        # 2.10 it reads beyond its memory (pytorch/pytorch#169849). The switch affects the whole
        # process, and is never turned back.
        torch.backends.cuda.enable_cudnn_sdp(False)
        # One pool for all graphs: they run one after another, and do not share results.
        self._pool = torch.cuda.graph_pool_handle()

    def stream(self) -> torch.cuda.Stream:
        """Return a stream that does not wait for others, not even for the default stream."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def capture_stream(self) -> torch.cuda.Stream:
        """Return a stream that neither batches nor captures of other loaded models use.

        A graph includes all work of its capture stream, and the workspaces of its matrix products.

        Raises:
            DeviceError: the loaded models hold all capture streams.
        """
        with CudaOps._lock:
            for _ in range(_STREAMS_OF_A_PRIORITY):
                stream = torch.cuda.Stream(self.device, priority=_CAPTURE_PRIORITY)  # type: ignore[no-untyped-call]
                if stream not in CudaOps._capture_streams:
                    CudaOps._capture_streams.add(stream)
                    return stream
        raise DeviceError(
            f"{_STREAMS_OF_A_PRIORITY} loaded models have CUDA graphs, the most of one process; "
            "unload a model first"
        )

    def on(self, stream: torch.cuda.Stream) -> torch.cuda.StreamContext:
        """Return a context that also makes the stream's device the thread's current one."""
        return torch.cuda.stream(stream)

    def event(self) -> torch.cuda.Event:
        """Return an event whose waiting threads sleep; spinning would occupy a core."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def pinned(self, shape: Sequence[int]) -> Tensor:
        """Return uint8 zeros in page-locked memory."""
        return torch.zeros(tuple(shape), dtype=torch.uint8, pin_memory=True)

    def download(self, tensor: Tensor) -> Tensor:
        """Return a pinned copy, to be read after an event: the copy is work of the stream."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def capture(self, work: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
        """Return a function that replays a CUDA graph of the work.

        Raises:
            RuntimeError: the work cannot be captured; this error hides the work's own.
        """
        graph = torch.cuda.CUDAGraph()
        # The capture creates its random state here. It must not be an inference tensor, or a later
        # capture outside of inference mode fails (pytorch/pytorch#166792). Other threads may use
        # the device meanwhile.
        with (
            CudaOps._captures_or_waits,
            torch.inference_mode(False),
            torch.cuda.graph(
                graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
            ),
            torch.inference_mode(),
        ):
            work()
        return graph.replay

    def synchronize(self) -> None:
        """Block until the device is idle or has failed."""
        with CudaOps._captures_or_waits, suppress(RuntimeError):
            torch.cuda.synchronize(self.device)
