"""The backend that runs the network in OpenVINO on the CPU.

Its fused kernels take less time than torch's operators, most of all for few images at a time. The torch module is
traced once, in float32; OpenVINO rounds to bfloat16 itself. https://docs.openvino.ai
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
import queue
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.errors import DeviceError
from model.explanation.folded_weights import fold
from model.network.vit import VisionTransformer, meta_model
from model.runtime.backend import Images, stacked
from model.runtime.pieces import compute_in_pieces
from model.runtime.postprocess import RELEVANCE, NetworkOutput, TopKOutput, run_network
from model.runtime.torch_backend import Normalise, TorchOptions
from model.runtime.torch_cpu import TorchCpu

if TYPE_CHECKING:
    import openvino

logger = logging.getLogger(__name__)

PRECISIONS: Final = {torch.float32: ("FP32", "f32"), torch.bfloat16: ("BF16", "bf16")}
"""The plugin's names of each dtype: for the capability, and for the hint."""

_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest norm of the difference to torch's float32 logits, relative to theirs. A graph that lost something is off by
its own norm; ViT-Ti/16 in bfloat16 is off by 0.01."""


_RELEVANCE_TOLERANCE: Final = {torch.float32: 0.05, torch.bfloat16: 0.5}
"""The same for relevance, which is a difference of large numbers: ViT-Ti/16 in bfloat16 is off by 0.1."""


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why OpenVINO cannot compute in this dtype on this device, or None."""
    if device.type != "cpu":
        return f"it runs on the CPU here, not on {device}"
    if importlib.util.find_spec("openvino") is None:
        return "the package is not installed: pip install -e '.[openvino]' in the clone"
    if dtype not in PRECISIONS:
        return f"it has no {str(dtype).removeprefix('torch.')} here"
    capability, _ = PRECISIONS[dtype]
    offered = _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return None if capability in offered else f"this CPU has no {capability} instructions that it uses"


class OpenVino:
    """Computes logits, the last layer's attention row and relevance in OpenVINO, other rows and explanations in torch.

    Relevance has a graph of its own with another copy of the weights, which is made on a thread when it is first asked
    for; until then, or if that fails, torch computes what is asked with it.
    """

    def __init__(self, network: OpenVinoNetwork, fallback: TorchCpu) -> None:
        self.name = f"openvino {network.version}"
        self.compilation, self.batch_sizes = fallback.compilation, fallback.batch_sizes
        self._network = network
        self._torch = fallback
        self._explaining: OpenVinoNetwork | None = None
        self._preparing = threading.Lock()

    def predict(self, images: Images, *, layers: tuple[int, ...], top_k: int, logits: bool = False) -> TopKOutput:
        """See `Backend.predict`."""
        rows = tuple(layer for layer in layers if layer != RELEVANCE)
        network: OpenVinoNetwork | None = self._network
        if rows != layers:
            if not self._preparing.locked():
                # Not a daemon: a thread that ends within OpenVINO's own code takes the process with it.
                threading.Thread(target=self.prepare_relevance, name="openvino-relevance").start()
            network = self._explaining
        if network is None or (rows and rows != network.layers):
            return self._torch.predict(images, layers=layers, top_k=top_k, logits=logits)
        with self._torch.threads as alone:
            output = compute_in_pieces(stacked(images), partial(network, alone=alone))
            return self._torch.postprocess(output, top_k, logits=logits)

    def prepare_relevance(self) -> None:
        """Make the graph that gives relevance, too, once; if it cannot be made that is logged, and torch stays."""
        if not self._preparing.acquire(blocking=False):
            return
        torch.set_num_threads(1)  # of the calling thread
        try:
            self._explaining = self._network.with_relevance(self._torch.float_copy())
        except DeviceError as error:
            logger.warning("torch computes relevance: %s", error)

    def explain(self, images: NDArray[np.uint8], classes: NDArray[np.int64], method: str) -> tuple[Tensor, Tensor]:
        """See `Backend.explain`."""
        return self._torch.explain(images, classes, method)

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        """See `Backend.logits`."""
        return self._network(images, alone=True).logits

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`; torch, which computes rows of other layers alone, is exercised at the first size."""
        # Its largest batch would take a fifth of the engine's start.
        self._torch.exercise(sizes[:1])
        for turn, size in enumerate(sizes):
            self._torch.require_finite(self.logits(self._torch.trial_images(size, turn)))

    def fill_caches(self, size: int) -> None:
        """See `Backend.fill_caches`."""
        self._network.fill_caches(self._torch.trial_images(size, 0))

    def compile(self) -> None:
        """Do nothing: OpenVINO compiles its graphs when they are made."""


class OpenVinoNetwork:
    """Computes logits and the last layer's attention row of any number of images, for several callers at once.

    Args:
        options: the model, which is read and not kept, and a dtype of `PRECISIONS`.
        threads: of a batch that is alone.
        streams: batches that compute at the same time, on a share of the threads each.

        relevance: whether to compute the relevance of the best class, too.

    Attributes:
        layers: the layer whose attention row is computed with the logits, or none.

    Raises:
        DeviceError: OpenVINO does not run this model, or gives other logits than torch, or torch's are not finite.
    """

    def __init__(self, options: TorchOptions, *, threads: int, streams: int, relevance: bool = False) -> None:
        config, dtype = options.model.config, options.dtype
        self._options, self._threads, self._streams = replace(options, model=meta_model(config)), threads, streams
        # A mean over the patch queries is made an image at a time, which a trace would fix to its own batch.
        self.layers = (config.depth - 1,) if config.attention_source != "patch_mean" else ()
        self._relevance = relevance
        self.version = importlib.metadata.version("openvino")
        traced = _Traced(options.model, Normalise(options.checkpoint.preprocess), self.layers, relevance)
        rows, columns = config.image_size
        images = np.random.default_rng(0).integers(0, 256, (3, rows, columns, config.in_channels), dtype=np.uint8)
        with torch.inference_mode():
            outputs = traced(torch.from_numpy(images))
        expected = outputs[0]
        if not expected.isfinite().all():
            raise DeviceError("the model gives scores that are not finite")
        try:
            graph = _convert(traced, torch.from_numpy(images[:2]))
            self._alone = _Requests(graph, dtype, threads=threads, streams=1)
            # One stream on all threads is what `alone` is already.
            self._beside = self._alone if streams == 1 else _Requests(graph, dtype, threads=threads, streams=streams)
        except RuntimeError as error:
            raise DeviceError(f"OpenVINO does not run this model: {str(error).strip().splitlines()[-1]}") from error
        for count in (1, 3):
            # With one image, and with another number than traced, a constant that the trace made of a size shows.
            found = self(images[:count], alone=count == 1)
            _require_close(found.logits, expected[:count], _TOLERANCE[dtype], "logits")
            if found.relevance is not None:
                _require_close(found.relevance, outputs[-1][:count], _RELEVANCE_TOLERANCE[dtype], "relevance")

    def with_relevance(self, model: VisionTransformer) -> OpenVinoNetwork:
        """Return a network that computes relevance, too; raises DeviceError.

        Args:
            model: the one that this network was made of, in float32.
        """
        options = replace(self._options, model=model)
        return OpenVinoNetwork(options, threads=self._threads, streams=self._streams, relevance=True)

    def __call__(self, images: NDArray[np.uint8], *, alone: bool) -> NetworkOutput:
        """Compute a batch uint8 [B, H, W, C], on all threads if no other computes; block while all streams are busy.

        Returns:
            Its attention is of `layers`.

        Raises:
            RuntimeError: as OpenVINO raises it.
        """
        outputs = (self._alone if alone else self._beside).infer(np.ascontiguousarray(images))
        logits, *others = (torch.from_numpy(output) for output in outputs)
        return NetworkOutput(logits, others[0] if self.layers else None, others[-1] if self._relevance else None)

    def fill_caches(self, images: NDArray[np.uint8]) -> None:
        """Run a batch on every stream: each keeps kernels and buffers of its own for a batch size."""
        self._alone.run_all(images)
        if self._beside is not self._alone:
            self._beside.run_all(images)


class _Traced(nn.Module):
    """The module that becomes the graph: normalisation, which OpenVINO fuses with what follows, and the network."""

    def __init__(
        self, model: VisionTransformer, normalise: Normalise, layers: tuple[int, ...], relevance: bool
    ) -> None:
        super().__init__()
        self.model = model
        self.normalise = normalise
        self.layers = (*layers, RELEVANCE) if relevance else layers
        self.folded = fold(model) if relevance else None

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        output = run_network(self.model, self.normalise(images), self.layers, self.folded)
        return tuple(part for part in output if part is not None)


class _Requests:
    """A compiled graph and its infer requests, of which each serves one caller at a time."""

    def __init__(self, graph: openvino.Model, dtype: torch.dtype, *, threads: int, streams: int) -> None:
        options = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[dtype][1],
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": streams,
            # Decoding takes turns with computing on the same cores: the system knows better which one is free.
            "ENABLE_CPU_PINNING": False,
        }
        compiled = _core().compile_model(graph, "CPU", options)
        self._streams = streams
        self._free: queue.SimpleQueue[openvino.InferRequest] = queue.SimpleQueue()
        for _ in range(streams):
            self._free.put(compiled.create_infer_request())

    def infer(self, images: NDArray[np.uint8]) -> list[NDArray[np.float32]]:
        request = self._free.get()
        try:
            # The outputs are copied: the request's own memory is the next caller's.
            return list(request.infer([images], share_inputs=True, share_outputs=False).values())
        finally:
            self._free.put(request)

    def run_all(self, images: NDArray[np.uint8]) -> None:
        """Run the same batch in all requests at the same time, which gives work to each stream."""
        requests = [self._free.get() for _ in range(self._streams)]
        try:
            for request in requests:
                request.start_async([images], share_inputs=True)
            for request in requests:
                request.wait()
        finally:
            for request in requests:
                self._free.put(request)


def _require_close(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    """Raise DeviceError if the difference's norm is more than the tolerance of the expected norm."""
    # A head that is all zeros gives zeros in both.
    relative = float((found - expected).norm() / expected.norm().clamp_min(1e-6))
    if not relative <= tolerance:
        raise DeviceError(f"OpenVINO's {name} are {relative:.2g} of their norm away from torch's")


def _convert(module: nn.Module, example: Tensor) -> openvino.Model:
    """Trace a module and translate it; the first axis of its input is then of any length."""
    _openvino()
    from openvino import PartialShape  # noqa: PLC0415  an optional package
    from openvino.frontend import FrontEndManager  # noqa: PLC0415
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # noqa: PLC0415

    with warnings.catch_warnings(), torch.inference_mode(mode=False), torch.no_grad():
        # The warnings are of sizes that become constants, as all but the first may, and of tracing being deprecated.
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
        frontend = FrontEndManager().load_by_framework("pytorch")
        # The decoder has a name because the frontend reads it until the graph is made, but does not keep it.
        decoder = TorchScriptPythonDecoder(traced, example_input=(example,))
        graph = frontend.convert(frontend.load(decoder))
    graph.reshape({0: PartialShape([-1, *example.shape[1:]])})
    return graph


@functools.cache
def _core() -> openvino.Core:
    """Return the one core of this process, which is never freed.

    The CPU plugin gives the thread that first uses a core another stack for signal handlers, and unmaps that stack
    when the core is freed. Freed on another thread, as the garbage collector may, it stays in use: the next signal that
    Python handles on the first thread ends the process.
    """
    core: openvino.Core = _openvino().Core()
    return core


def _openvino() -> Any:
    """Import the package without its telemetry, which would report the import to a server of its maker."""
    # None makes the telemetry's import fail, for which the package has a stand-in.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino  # noqa: PLC0415  optional, and loaded once it is silenced

    return openvino
