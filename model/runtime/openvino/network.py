"""A network as graphs of OpenVINO, each compiled for a batch size; wherever its graph comes from."""

from __future__ import annotations

import importlib.metadata
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError
from model.runtime.backend import require_close
from model.runtime.batches import BatchOutputs, BatchRequest, HostOutputs, compute_in_pieces, joined, pieces
from model.runtime.openvino.graph import Graphs, Requests, compile_all

if TYPE_CHECKING:
    import openvino

logger = logging.getLogger(__name__)

_SIZES: Final = (1, 2, 4, 8)
"""What a small network has graphs for: `python -m benchmarks.graph_sizes` has what others cost and bring."""

_FIXED_BYTES: Final = 160 << 20
"""What these graphs may take together, more or less; the one for an image that is alone comes on top, and with
relevance there are as many again."""

_GRAPH_BYTES: Final = 7 << 20
"""What a graph for one size takes beside its weights, about: kernels, and descriptions of its operations."""

_STREAM_BYTES: Final = 3 << 20
"""What each of its streams adds."""


class NetworkGraph(NamedTuple):
    """A network as a graph of OpenVINO.

    Attributes:
        model: takes images, uint8 [B, H, W, C] with B of any number, and normalises them itself; its outputs are
            float32.
        outputs: their names, in the model's order: of `BatchOutputs`.
        request: what they are: the last layer's attention row where it is given, and extras.
        reference: torch's own outputs for all `reference_images`; None: the graph is not compared with anything.
    """

    model: openvino.Model
    outputs: tuple[str, ...]
    request: BatchRequest
    reference: HostOutputs | None = None


REFERENCE_COUNT: Final = _SIZES[-1]
"""Images that graphs are compared with torch on: as many as the largest graph of one size takes."""


def reference_images(count: int, shape: Sequence[int]) -> NDArray[np.uint8]:
    """Return the first of these images, uint8 [count, H, W, C]: noise, which is the same at each start.

    Args:
        count: at most `REFERENCE_COUNT`.
        shape: (H, W, C).
    """
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


class OpenVinoNetwork:
    """Computes logits and the last layer's attention row of any number of images, for several callers at once.

    A small network has a graph for each of a few numbers of images. These are faster than a graph for any number, and
    most where numbers change from batch to batch, but take more memory. An image that is alone has a graph that
    computes it on all threads; a batch that is alone is divided among the streams. Each graph is run once it is
    compiled, on every stream, and its outputs are compared with torch's.

    Args:
        graph: the network, in float32: OpenVINO rounds to the dtype itself.
        dtype: of `PRECISIONS`.
        threads: of a batch that is alone.
        streams: batches that compute at the same time, on a share of the threads each.
        workers: threads that compile.
        lazy: whether each size is compiled when it is first needed, for few pictures.

    Attributes:
        dtype: what it computes in, of `PRECISIONS`.
        request: what the graphs give: extras, and the last layer's attention row where it can be traced.

    Raises:
        DeviceError: OpenVINO does not compile this graph, or gives other outputs than torch.
    """

    def __init__(
        self,
        graph: NetworkGraph,
        dtype: str,
        *,
        threads: int,
        streams: int,
        workers: int | None = None,
        lazy: bool = False,
    ) -> None:
        self.version = importlib.metadata.version("openvino")
        self.request = graph.request
        self.dtype = dtype
        self._names, self._streams = graph.outputs, streams
        self._sizes: tuple[int, ...] | None = _SIZES if _is_small(weights_bytes(graph.model, dtype), streams) else None
        self._all_sizes = self._sizes
        self._shape = [side.get_length() for side in list(graph.model.inputs[0].partial_shape)[1:]]
        self._reference = graph.reference
        of = partial(Graphs, graph.model, dtype, self._check, threads=threads)
        self._graphs = of(self._sizes or (None,), streams=streams)
        # One stream is on all threads already.
        self._lone = self._graphs if streams == 1 else of((1,), streams=1)
        self._workers = workers or threads
        if not lazy:
            self._compile(self._sizes)

    def _compile(self, sizes: tuple[int, ...] | None) -> None:
        tasks = {(self._graphs, size): None for size in sizes or (None,)} | {(self._lone, 1): None}
        try:
            compile_all([*tasks], self._workers)
        except RuntimeError as error:
            raise _does_not_run(error) from error

    def compile_first(self) -> None:
        """Compile graphs for one image, in which all batches are computed until `complete`; raises DeviceError."""
        self._sizes = self._all_sizes and self._all_sizes[:1]
        self._compile(self._sizes)

    def complete(self) -> None:
        """Compile the graphs of the other sizes, beside batches; once all have run, batches are computed in them."""
        try:
            for size in set(self._all_sizes or ()) - set(self._sizes or ()):
                self._graphs.of(size)
        except (DeviceError, RuntimeError) as error:
            logger.warning("batches are computed in pieces of %s images: %s", self._sizes, _does_not_run(error))
        else:
            self._sizes = self._all_sizes

    def _check(self, requests: Requests, size: int | None) -> None:
        """Raise DeviceError if a graph's outputs are not torch's; what it allocates for a batch, it has afterwards."""
        # In a graph for any size a constant that the trace made of a size shows with other sizes than were traced.
        for count in (size,) if size else (1, 3):
            for outputs in requests.run_all(reference_images(count, self._shape)):
                if self._reference is not None:
                    exact = self.dtype == "float32"
                    require_close(self._named(outputs), self._reference, exact=exact, source="OpenVINO")

    def __call__(self, images: NDArray[np.uint8], *, alone: bool) -> HostOutputs:
        """Compute a batch uint8 [B, H, W, C], on all threads if no other computes; block while all streams are busy.

        Returns:
            What `request` asks for.

        Raises:
            RuntimeError: as OpenVINO raises it.
        """
        images = np.ascontiguousarray(images)
        if not alone or self._streams == 1:
            of = self._graphs.of
            return compute_in_pieces(images, lambda piece: self._named(of(len(piece)).infer(piece)), self._sizes)
        if len(images) == 1:
            return self._named(self._lone.of(1).infer(images))
        parts = np.array_split(images, min(self._streams, len(images)))
        return self._at_once([each for part in parts for each in pieces(part, self._sizes)])

    def _at_once(self, parts: Sequence[NDArray[np.uint8]]) -> HostOutputs:
        """Compute pieces of a batch on several streams; another batch may take these in turn."""
        running: deque[Callable[[], list[NDArray[np.float32]]]] = deque()
        done: list[HostOutputs] = []
        try:
            for part in parts:
                started = None
                while started is None:
                    if len(running) == self._streams:
                        done.append(self._named(running.popleft()()))
                    # Who holds a stream waits for no other: two batches might wait for each other.
                    started = self._graphs.of(len(part)).start(part, wait=not running)
                    if started is None:
                        done.append(self._named(running.popleft()()))
                running.append(started)
            while running:
                done.append(self._named(running.popleft()()))
        finally:
            for left in running:  # what failed leaves no stream behind that is still busy
                with suppress(RuntimeError):
                    left()
        return joined(done)

    def _named(self, outputs: Sequence[NDArray[np.float32]]) -> HostOutputs:
        return BatchOutputs.of(dict(zip(self._names, outputs, strict=True)))

    def fill_caches(self, images: NDArray[np.uint8]) -> None:
        """Run a batch on every stream, unless its graph was run as it was compiled: each keeps kernels and buffers."""
        if self._sizes is None:
            self._graphs.of(None).run_all(images)


def weights_bytes(model: openvino.Model, dtype: str) -> int:
    """Return the bytes of a graph's constants once they are rounded to a dtype; what is smaller already stays so."""
    bits = {"float32": 32, "bfloat16": 16}[dtype]
    constants = (each.output(0) for each in model.get_ops() if each.get_type_name() == "Constant")
    sizes = [int(math.prod(each.shape)) * min(int(each.element_type.bitwidth), bits) for each in constants]
    return sum(sizes) // 8


def _is_small(weights: int, streams: int) -> bool:
    """Return whether graphs for each size of a piece have room."""
    return len(_SIZES) * (weights + _GRAPH_BYTES + streams * _STREAM_BYTES) <= _FIXED_BYTES


def _does_not_run(error: DeviceError | RuntimeError) -> DeviceError:
    if isinstance(error, DeviceError):
        return error
    return DeviceError(f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}")
