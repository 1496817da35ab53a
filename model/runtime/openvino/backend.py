"""The backend that runs the network in OpenVINO on the CPU, as graphs that are each compiled for a
batch size.

Its fused kernels take less time than torch's operators, most of all for few images at a time. A
graph comes from a trace of the torch module in float32, or is one that was kept; OpenVINO rounds to
bfloat16 itself. https://docs.openvino.ai
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import math
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.errors import DeviceError, VitError
from model.heads import Head
from model.outputs import MapRequest, Pooling
from model.runtime.backend import (
    SIZES,
    Aim,
    Backend,
    BatchOutputs,
    BatchRequest,
    GraphKind,
    HostOutputs,
    Images,
    ThreadPolicy,
    compute_in_pieces,
    joined,
    noise_images,
    pieces,
    require_close,
    stacked,
    with_best,
)
from model.runtime.cpu import give_back_memory, keep_freed_memory

if TYPE_CHECKING:
    import openvino

logger = logging.getLogger(__name__)

# Why it runs the network.
REASON: Final = "OpenVINO is installed, has the dtype and agrees with torch"

# The plugin's names of each dtype: for the capability, and for the hint.
PRECISIONS: Final = {"float32": ("FP32", "f32"), "bfloat16": ("BF16", "bf16")}

# Kernels that the plugin generates for chains of small operations. A ViT takes as long without
# them, and each of its graphs takes 10 to 20 MiB less. The option is not documented: versions that
# do not know it refuse it.
_LEAN: Final = {"SNIPPETS_MODE": "DISABLE"}


def unsupported_reason(dtype: str) -> str | None:
    """Return why OpenVINO cannot compute in the dtype of this name on the CPU, or None."""
    if importlib.util.find_spec("openvino") is None:
        return "the package is not installed: pip install 'vitserve[openvino]'"
    if dtype not in PRECISIONS:
        return f"it has no {dtype} here"
    capability, _ = PRECISIONS[dtype]
    offered = core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return (
        None if capability in offered else f"this CPU has no {capability} instructions that it uses"
    )


class CompiledGraph:
    """A graph compiled for one batch size, or for any, and its infer requests, of which each serves
    one caller.

    In a graph for any size each operation finds out its shapes and looks up its kernels anew
    whenever a batch has another size than the one before.

    Args:
        threads: of all streams together.
        size: the number of images in each batch; None for any.
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
            # Decoding takes turns with computing on the same cores: the system knows better which
            # one is free.
            "ENABLE_CPU_PINNING": False,
        }
        if size is not None:
            from openvino import PartialShape  # noqa: PLC0415  an optional package

            shape = [size, *list(graph.inputs[0].partial_shape)[1:]]
            graph = graph.clone()  # which shares the weights
            graph.reshape({0: PartialShape(shape)})
        try:
            compiled = core().compile_model(graph, "CPU", {**options, **_LEAN})
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
            # The outputs are copied: the request's own memory is the next caller's.
            return list(request.infer([images], share_inputs=True, share_outputs=False).values())
        finally:
            self._free.put(request)

    def infer_on_all(self, images: NDArray[np.uint8]) -> list[list[NDArray[np.float32]]]:
        """Compute the same batch in all requests at the same time, which gives work to each stream."""
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


_STARTING: Final = threading.Lock()


def core() -> openvino.Core:
    """Return the one core of this process, once OpenVINO may be called from several threads."""
    with _STARTING:
        return _start()


@functools.cache
def _start() -> openvino.Core:
    """Return a core, which is never freed.

    The CPU plugin gives the thread that first uses a core another stack for signal handlers, and
    unmaps that stack when the core is freed. Freed on another thread, as the garbage collector may,
    it stays in use: the next signal that Python handles on the first thread ends the process.
    """
    package = openvino_package()
    # These fill tables of the bindings when they are first called, under a lock of C++ and with
    # Python code in between: two threads that came first at the same time would wait for each other
    # for ever.
    package.Type.u8.to_dtype()
    package.Tensor(np.zeros(1, np.uint8))
    made: openvino.Core = package.Core()
    return made


def openvino_package() -> Any:
    """Import the package without its telemetry, which would report the import to a server of its
    maker.
    """
    # None makes the telemetry's import fail, for which the package has a stand-in.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino  # noqa: PLC0415  optional, and loaded once it is silenced

    return openvino


# What the graphs of all sizes may take together, more or less; the one for an image that is alone
# comes on top, and with relevance there are as many again.
_FIXED_BYTES: Final = 160 << 20

# What a graph for one size takes beside its weights, about: kernels, and descriptions of its
# operations.
_GRAPH_BYTES: Final = 7 << 20

# What each of its streams adds.
_STREAM_BYTES: Final = 3 << 20

# Images that graphs are compared with torch on: as many as the largest graph of one size takes.
REFERENCE_COUNT: Final = SIZES[-1]


class NetworkGraph(NamedTuple):
    """A network as a graph of OpenVINO.

    Attributes:
        model: takes images, uint8 [B, H, W, C] with B of any number, and normalises them itself;
            its outputs are float32.
        outputs: their names, in the model's order: of `BatchOutputs`.
        request: what they are: the last layer's attention row where it is given, and perhaps
        relevance.
        reference: torch's own outputs for the first `REFERENCE_COUNT` of `noise_images`.
    """

    model: openvino.Model
    outputs: tuple[str, ...]
    request: BatchRequest
    reference: HostOutputs


class _Key(NamedTuple):
    """The images that a graph computes at once, None for any number, and whether it does so on all
    threads.
    """

    size: int | None
    lone: bool


class OpenVinoNetwork:
    """Computes logits and the last layer's attention row of any number of images, for several
    callers at once.

    A small network has a graph for each of a few numbers of images. These are faster than a graph
    for any number, and most where numbers change from batch to batch, but take more memory. An
    image that is alone has a graph that computes it on all threads; a batch that is alone is
    divided among the streams. Each graph is compiled when it is first needed, or by `complete`;
    then it is run on every stream, and its outputs are compared with torch's.

    Args:
        graph: the network, in float32: OpenVINO rounds to the dtype itself.
        dtype: of `PRECISIONS`.
        threads: of an image that is alone.
        streams: batches that compute at the same time, on a share of the threads each.

    Attributes:
        request: what the graphs give.

    Raises:
        DeviceError: OpenVINO does not compile this graph, or gives other outputs than torch.
    """

    def __init__(self, graph: NetworkGraph, dtype: str, *, threads: int, streams: int) -> None:
        self.version = importlib.metadata.version("openvino")
        self.request, self.dtype = graph.request, dtype
        self._graph, self._threads, self._streams = graph, threads, streams
        self._shape = [side.get_length() for side in list(graph.model.inputs[0].partial_shape)[1:]]
        room = len(SIZES) * (
            weights_bytes(graph.model, dtype) + _GRAPH_BYTES + streams * _STREAM_BYTES
        )
        self._any_size = room > _FIXED_BYTES
        self._compiled: dict[_Key, CompiledGraph] = {}
        self._locks = {
            _Key(size, lone): threading.Lock() for size in (None, *SIZES) for lone in (False, True)
        }
        self._parts = ThreadPoolExecutor(max(threads, streams), thread_name_prefix="openvino-part")
        list(self._parts.map(self._of, {self._key(1), _Key(1, streams > 1)}))

    def complete(self, *sizes: int) -> None:
        """Compile the graphs of so many images that are not there yet; raises as this class."""
        for size in sizes:
            self._of(self._key(size))

    def _key(self, count: int) -> _Key:
        return _Key(None if self._any_size else count, lone=False)

    def _of(self, key: _Key) -> CompiledGraph:
        """Return a graph, which is compiled when it is first needed."""
        found = self._compiled.get(key)
        if found is None:
            with self._locks[key]:
                found = self._compiled[key] = self._compiled.get(key) or self._compile(key)
        return found

    def _compile(self, key: _Key) -> CompiledGraph:
        streams = 1 if key.lone else self._streams
        try:
            made = CompiledGraph(
                self._graph.model, self.dtype, threads=self._threads, streams=streams, size=key.size
            )
            # In a graph for any size a constant that the trace made of a size shows with other
            # sizes than were traced.
            for count in (key.size,) if key.size else (1, 3):
                for outputs in made.infer_on_all(noise_images(count, self._shape)):
                    exact = self.dtype == "float32"
                    require_close(
                        self._named(outputs), self._graph.reference, exact=exact, source="OpenVINO"
                    )
        except RuntimeError as error:
            raise DeviceError(
                f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}"
            ) from error
        return made

    def __call__(self, images: NDArray[np.uint8], *, alone: bool) -> HostOutputs:
        """Compute a batch uint8 [B, H, W, C], on all threads if no other computes; block while all
        streams are busy.

        Returns:
            What `request` asks for.

        Raises:
            DeviceError: what is compiled now does not compute what torch does.
            RuntimeError: as OpenVINO raises it.
        """
        images = np.ascontiguousarray(images)
        if not alone or self._streams == 1:
            return compute_in_pieces(images, self._infer)
        if len(images) == 1:
            return self._named(self._of(_Key(1, lone=True)).infer(images))
        parts = np.array_split(images, min(self._streams, len(images)))
        return joined(
            list(self._parts.map(self._infer, [piece for part in parts for piece in pieces(part)]))
        )

    def _infer(self, piece: NDArray[np.uint8]) -> HostOutputs:
        return self._named(self._of(self._key(len(piece))).infer(piece))

    def _named(self, outputs: Sequence[NDArray[np.float32]]) -> HostOutputs:
        return BatchOutputs.of(dict(zip(self._graph.outputs, outputs, strict=True)))


def weights_bytes(model: openvino.Model, dtype: str) -> int:
    """Return the bytes of a graph's constants once they are rounded to a dtype; what is smaller
    already stays so.
    """
    bits = {"float32": 32, "bfloat16": 16}[dtype]
    constants = (each.output(0) for each in model.get_ops() if each.get_type_name() == "Constant")
    sizes = [
        int(math.prod(each.shape)) * min(int(each.element_type.bitwidth), bits)
        for each in constants
    ]
    return sum(sizes) // 8


class OpenVino(Backend):
    """Computes all but rows of other layers than the last, some embeddings, and explanations, which
    are torch's.

    Relevance and transfer features each have a network of their own, which shares the float32
    weights. It is made on a thread when it is first asked for. Until then, or if that fails, torch
    computes; where torch is not loaded, `defers` says so beforehand.

    Args:
        network: the plain one.
        head: the checkpoint's.
        threads: counts the batches under way.
        make_torch: imports torch, which takes a second and 180 MiB, and returns its backend, which
            takes the same threads; called by one thread when torch is first needed.
        make_network: returns another network; raises DeviceError or RuntimeError.
    """

    def __init__(
        self,
        network: OpenVinoNetwork,
        head: Head,
        threads: ThreadPolicy,
        make_torch: Callable[[], Backend],
        make_network: Callable[[GraphKind], OpenVinoNetwork],
    ) -> None:
        keep_freed_memory()
        self.name = f"openvino {network.version}"
        self.largest_tried = 1  # for others it compiles behind the service
        self.usual = (BatchRequest(), network.request)
        self._network, self._head, self._threads, self._make_torch = (
            network,
            head,
            threads,
            make_torch,
        )
        self._make_network = make_network
        self._networks: dict[GraphKind, OpenVinoNetwork] = {"plain": network}
        self._begun: set[GraphKind] = {"plain"}
        self._prepared: set[GraphKind] = {"plain"}
        self._in_service = False
        self._preparing = threading.Lock()
        self._loading = threading.Lock()
        self._torch: Backend | None = None

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        kind = request.graph_kind
        if self._torch is None:
            self.prepare(kind)
        elif kind not in self._begun:
            self._begun.add(kind)
            # Not a daemon: a thread that ends within OpenVINO's own code takes the process with it.
            threading.Thread(target=self.prepare, args=(kind,), name="openvino-prepare").start()
        network = self._network_of(request)
        if network is not None:
            try:
                with self._threads as alone:
                    return with_best(
                        network(stacked(images), alone=alone), self._head, request.top_k
                    )
            except DeviceError as error:  # of a graph that was compiled just now
                logger.warning("torch computes a batch: %s", error)
        return self.load_torch().predict(images, request)

    def load_torch(self) -> Backend:
        """Return torch's backend; raises RuntimeError where it cannot be made, each time anew."""
        with self._loading:
            if self._torch is None:
                try:
                    self._torch = self._make_torch()
                except VitError as error:  # of one batch, and no reason to end the engine
                    raise RuntimeError(str(error)) from error
            return self._torch

    def _network_of(self, request: BatchRequest) -> OpenVinoNetwork | None:
        """Return the network that gives all that is asked for, if there is one."""
        network = self._networks.get(request.graph_kind)
        return network if network is not None and network.request.covers(request) else None

    def covers(self, request: BatchRequest) -> bool:
        """See `Backend.covers`."""
        return self._network_of(request) is not None

    def defers(self, request: BatchRequest) -> bool:
        """See `Backend.defers`."""
        return self._torch is None and self._network_of(request) is None

    def prepare(self, kind: GraphKind) -> None:
        """Make a network, once; torch computes what it would give if that fails."""
        if kind in self._prepared:
            return
        with self._preparing:
            if kind in self._prepared:
                return
            try:
                network = self._make_network(kind)
                if self._in_service:  # a few pictures do without the graphs of other sizes
                    network.complete(*SIZES)
                self._networks[kind] = network
            except (DeviceError, RuntimeError) as error:
                logger.warning("torch computes %s: %s", kind, error)
            self._prepared.add(kind)

    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """See `Backend.aim`: the graph with relevance begins it with the own head's weights."""
        return self.load_torch().aim(images, request, aims)

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[np.int64] | NDArray[np.float32],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`."""
        return self.load_torch().explain(images, targets, request, features)

    def compile(self) -> None:
        """Compile for the other sizes, on a thread: nobody waits for them."""
        give_back_memory()
        self._in_service = True

        network = weakref.ref(self._network)  # one that is unloaded meanwhile need not be complete

        def run() -> None:
            try:
                for size in SIZES:
                    found = network()
                    if found is not None:
                        found.complete(size)
                    del found
            except (DeviceError, RuntimeError) as error:
                logger.warning("batches of some sizes are computed by torch: %s", error)
            give_back_memory()

        threading.Thread(target=run, name="openvino-compile").start()
