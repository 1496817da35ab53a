"""What runs a graph of OpenVINO on the CPU. https://docs.openvino.ai"""

from __future__ import annotations

import functools
import queue
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import openvino

PRECISIONS: Final = {"float32": ("FP32", "f32"), "bfloat16": ("BF16", "bf16")}
"""The plugin's names of each dtype: for the capability, and for the hint."""

_LEAN: Final = {"SNIPPETS_MODE": "DISABLE"}
"""Kernels that the plugin generates for chains of small operations. A ViT takes as long without them, and each of its
graphs takes 10 to 20 MiB less. The option is not documented: versions that do not know it refuse it."""


class CompiledGraph:
    """A graph compiled for one batch size, or for any, and its infer requests, of which each serves one caller.

    In a graph for any size each operation finds out its shapes and looks up its kernels anew whenever a batch has
    another size than the one before.

    Args:
        threads: of all streams together.
        size: the number of images in each batch; None for any.
    """

    def __init__(
        self, graph: openvino.Model, dtype: str, *, threads: int, streams: int, size: int | None = None
    ) -> None:
        options = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype][1],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": streams,
            # Decoding takes turns with computing on the same cores: the system knows better which one is free.
            "ENABLE_CPU_PINNING": False,
        }
        if size is not None:
            graph = _of_size(graph, size)
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
            return [[output.data.copy() for output in request.output_tensors] for request in requests]
        finally:
            for request in requests:
                self._free.put(request)


def _of_size(graph: openvino.Model, size: int) -> openvino.Model:
    """Return the graph for one batch size; it shares the weights."""
    from openvino import PartialShape  # noqa: PLC0415  an optional package

    fixed = graph.clone()
    fixed.reshape({0: PartialShape([size, *list(graph.inputs[0].partial_shape)[1:]])})
    return fixed


_STARTING: Final = threading.Lock()


def core() -> openvino.Core:
    """Return the one core of this process, once OpenVINO may be called from several threads."""
    with _STARTING:
        return _start()


@functools.cache
def _start() -> openvino.Core:
    """Return a core, which is never freed.

    The CPU plugin gives the thread that first uses a core another stack for signal handlers, and unmaps that stack
    when the core is freed. Freed on another thread, as the garbage collector may, it stays in use: the next signal that
    Python handles on the first thread ends the process.
    """
    package = openvino_package()
    # These fill tables of the bindings when they are first called, under a lock of C++ and with Python code in between:
    # two threads that came first at the same time would wait for each other for ever.
    package.Type.u8.to_dtype()
    package.Tensor(np.zeros(1, np.uint8))
    made: openvino.Core = package.Core()
    return made


def openvino_package() -> Any:
    """Import the package without its telemetry, which would report the import to a server of its maker."""
    # None makes the telemetry's import fail, for which the package has a stand-in.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino  # noqa: PLC0415  optional, and loaded once it is silenced

    return openvino
