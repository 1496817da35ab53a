"""A network as graphs of OpenVINO that are compiled for a batch size each, on the CPU.

A graph comes from a trace of the torch module in float32, or was kept from an earlier start.
OpenVINO rounds to bfloat16 itself. See https://docs.openvino.ai.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError
from model.runtime.backend import HostOutputs
from model.runtime.batch_request import BatchRequest
from model.runtime.batch_sizes import SIZES, compute_in_pieces, joined, pieces
from model.runtime.cpu import ThreadPolicy
from model.runtime.trial import noise_images, require_close

if TYPE_CHECKING:
    import openvino

# The plugin's names of each dtype: for the capability, and for the hint.
PRECISIONS: Final = {"float32": ("FP32", "f32"), "bfloat16": ("BF16", "bf16")}

# Disables kernels that the plugin generates for chains of small operations. A ViT takes as long
# without them, and each of its graphs needs 10 to 20 MiB less. The option is not documented, and
# versions without it refuse it.
LEAN_OPTIONS: Final = {"SNIPPETS_MODE": "DISABLE"}

# Approximate limit, in bytes, of all graphs of one network, without the graph for a lone image. A
# model with relevance has two networks.
FIXED_BYTES: Final = 160 << 20

# About the bytes of a graph for one size besides its weights: kernels and descriptions of
# operations.
_GRAPH_BYTES: Final = 7 << 20

# About the bytes of each of its streams.
_STREAM_BYTES: Final = 3 << 20

# Number of images on which graphs are compared with torch: the largest size of a graph.
REFERENCE_COUNT: Final = SIZES[-1]


def unsupported_reason(dtype: str) -> str | None:
    """Return why OpenVINO cannot compute in the dtype of this name on the CPU, or None."""
    if importlib.util.find_spec("openvino") is None:
        return "the package is not installed: pip install 'vitserve[openvino]'"
    if dtype not in PRECISIONS:
        return f"it has no {dtype} here"
    capability, _ = PRECISIONS[dtype]
    if capability in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        return None
    return f"this CPU has no {capability} instructions that it uses"


_STARTING: Final = threading.Lock()


def core() -> openvino.Core:
    """Return the only core of this process, which several threads may use."""
    with _STARTING:
        return _start()


@functools.cache
def _start() -> openvino.Core:
    """Return a core, which is never freed.

    The CPU plugin gives the thread that first uses a core another stack for signal handlers, and
    unmaps that stack when the core is freed. If the garbage collector frees the core on another
    thread, the first thread goes on using the stack, and the next signal that Python handles there
    ends the process.
    """
    package = openvino_package()
    # These calls fill tables of the bindings, under a lock of C++ and with Python code in between.
    # Two threads that made them first at the same time would deadlock.
    package.Type.u8.to_dtype()
    package.Tensor(np.zeros(1, np.uint8))
    core: openvino.Core = package.Core()
    return core


def openvino_package() -> Any:
    """Import the package without its telemetry, which would report the import to its maker."""
    # None makes the telemetry's import fail, and the package then uses a stand-in.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino  # noqa: PLC0415  optional, and loaded after its telemetry is disabled

    return openvino


class CompiledGraph:
    """A graph compiled for one batch size, or for any, with one infer request per stream.

    In a graph for any size, each operation determines its shapes and looks up its kernels again
    whenever the batch size changes.

    Args:
        graph: the graph for any number of images.
        dtype: a key of `PRECISIONS`.
        threads: threads of all streams together.
        streams: number of callers served at the same time.
        size: number of images in each batch; None for any.
    """

    def __init__(
        self,
        graph: openvino.Model,
        dtype: str,
        *,
        threads: int,
        streams: int,
        size: int | None = None,
    ) -> None:
        options = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype][1],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": streams,
            # Decoding and computing share the cores: the system knows best which core is free.
            "ENABLE_CPU_PINNING": False,
        }
        if size is not None:
            from openvino import PartialShape  # noqa: PLC0415  an optional package

            shape = [size, *list(graph.inputs[0].partial_shape)[1:]]
            graph = graph.clone()  # the clone shares the weights
            graph.reshape({0: PartialShape(shape)})
        try:
            compiled = core().compile_model(graph, "CPU", {**options, **LEAN_OPTIONS})
        except RuntimeError:
            compiled = core().compile_model(graph, "CPU", options)
        self._streams = streams
        self._free: queue.SimpleQueue[openvino.InferRequest] = queue.SimpleQueue()
        for _ in range(streams):
            self._free.put(compiled.create_infer_request())

    def infer(self, images: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        """Return the graph's outputs for a batch; block while all requests are busy."""
        request = self._free.get()
        try:
            # The outputs are copied, because the next caller reuses the request's memory.
            return list(request.infer([images], share_inputs=True, share_outputs=False).values())
        finally:
            self._free.put(request)

    def infer_on_all(self, images: NDArray[np.uint8]) -> list[list[NDArray[np.float32]]]:
        """Compute the same batch in all requests at the same time, so that each stream is used."""
        requests = [self._free.get() for _ in range(self._streams)]
        try:
            for request in requests:
                request.start_async([images], share_inputs=True)
            for request in requests:
                request.wait()
            return [
                [output.data.copy() for output in request.output_tensors] for request in requests
            ]
        finally:
            for request in requests:
                self._free.put(request)


class NetworkGraph(NamedTuple):
    """A network as a graph of OpenVINO.

    Attributes:
        model: the graph, which takes any number of images, uint8 [B, H, W, C], and normalises them
            itself; its outputs are float32.
        outputs: names of its outputs in `HostOutputs`, in the model's order.
        request: the outputs that it computes; see `BatchRequest.of_graph`.
        reference: torch's outputs for the first `REFERENCE_COUNT` of `noise_images`.
    """

    model: openvino.Model
    outputs: tuple[str, ...]
    request: BatchRequest
    reference: HostOutputs


class _Key(NamedTuple):
    """Number of images that a graph computes, None for any, and whether it uses all threads."""

    size: int | None
    lone: bool


class OpenVinoNetwork:
    """Computes what its graph does for any number of images, for several callers at once.

    A small network has a graph for each of a few batch sizes. These are faster than one graph for
    any size, most of all if sizes change from batch to batch, but need more memory. A lone image
    has a graph that uses all threads; a lone batch is divided among the streams. Each graph is
    compiled on first use or by `complete`. It then runs on every stream, and its outputs are
    compared with torch's.

    Args:
        graph: the network, in float32.
        dtype: a key of `PRECISIONS`, to which OpenVINO rounds.
        threads: a lone image uses all `count` threads; up to `streams` batches share them.

    Attributes:
        request: the outputs that the graphs compute.

    Raises:
        DeviceError: OpenVINO does not compile this graph, or its outputs differ from torch's.
    """

    def __init__(self, graph: NetworkGraph, dtype: str, threads: ThreadPolicy) -> None:
        self.version = importlib.metadata.version("openvino")
        self.request = graph.request
        self.dtype = dtype
        self._graph = graph
        self._threads = threads.count
        self._streams = threads.streams
        self._shape = [side.get_length() for side in list(graph.model.inputs[0].partial_shape)[1:]]
        graph_bytes = (
            weights_bytes(graph.model, dtype) + _GRAPH_BYTES + self._streams * _STREAM_BYTES
        )
        self._any_size = len(SIZES) * graph_bytes > FIXED_BYTES
        self._compiled: dict[_Key, CompiledGraph] = {}
        self._locks = {
            _Key(size, lone): threading.Lock() for size in (None, *SIZES) for lone in (False, True)
        }
        parts = max(threads.count, threads.streams)
        self._parts = ThreadPoolExecutor(parts, thread_name_prefix="openvino-part")
        list(self._parts.map(self._of, {self._key(1), _Key(1, self._streams > 1)}))

    def complete(self, *sizes: int) -> None:
        """Compile the graphs of these sizes unless they exist.

        Raises:
            DeviceError: see this class.
        """
        for size in sizes:
            self._of(self._key(size))

    def _key(self, count: int) -> _Key:
        return _Key(None if self._any_size else count, lone=False)

    def _of(self, key: _Key) -> CompiledGraph:
        """Return a graph, which is compiled on first use."""
        compiled = self._compiled.get(key)
        if compiled is not None:
            return compiled
        with self._locks[key]:
            if key not in self._compiled:
                self._compiled[key] = self._compile(key)
            return self._compiled[key]

    def _compile(self, key: _Key) -> CompiledGraph:
        streams = 1 if key.lone else self._streams
        # If the trace made a constant of a batch size, a graph for any size fails with others.
        counts = (key.size,) if key.size else (1, 3)
        try:
            compiled = CompiledGraph(
                self._graph.model, self.dtype, threads=self._threads, streams=streams, size=key.size
            )
            for count in counts:
                for outputs in compiled.infer_on_all(noise_images(count, self._shape)):
                    require_close(
                        self._named(outputs),
                        self._graph.reference,
                        exact=self.dtype == "float32",
                        source="OpenVINO",
                    )
        except RuntimeError as error:
            raise does_not_run(error) from error
        return compiled

    def __call__(self, images: NDArray[np.uint8], *, alone: bool) -> HostOutputs:
        """Compute a batch uint8 [B, H, W, C]; block while all streams are busy.

        Args:
            images: the batch.
            alone: whether no other batch is being computed, so that all threads are free.

        Returns:
            What `request` asks for.

        Raises:
            DeviceError: a graph that is compiled now differs from torch.
            RuntimeError: from OpenVINO.
        """
        images = np.ascontiguousarray(images)
        if not alone or self._streams == 1:
            return compute_in_pieces(images, self._infer)
        if len(images) == 1:
            return self._named(self._of(_Key(1, lone=True)).infer(images))
        shares = np.array_split(images, min(self._streams, len(images)))
        cut = [piece for share in shares for piece in pieces(share)]
        return joined(list(self._parts.map(self._infer, cut)))

    def _infer(self, piece: NDArray[np.uint8]) -> HostOutputs:
        return self._named(self._of(self._key(len(piece))).infer(piece))

    def _named(self, outputs: Sequence[NDArray[np.float32]]) -> HostOutputs:
        return dict(zip(self._graph.outputs, outputs, strict=True))


def does_not_run(error: RuntimeError) -> DeviceError:
    """Return the error for a model that OpenVINO does not run, with the end of its message."""
    last_line = str(error).strip().splitlines()[-1]
    return DeviceError(f"OpenVINO does not run this model: {last_line}")


def weights_bytes(model: openvino.Model, dtype: str) -> int:
    """Return the bytes of a graph's constants after rounding to the dtype."""
    most_bits = {"float32": 32, "bfloat16": 16}[dtype]
    bits = 0
    for operation in model.get_ops():
        if operation.get_type_name() == "Constant":
            constant = operation.output(0)
            element_bits = min(int(constant.element_type.bitwidth), most_bits)
            bits += int(math.prod(constant.shape)) * element_bits
    return bits // 8
