"""The backend that runs the network in torch on a GPU, through the batch launcher and its captured graphs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import DeviceError, NewProcessNeeded
from model.explanation.folded_weights import FoldedWeights
from model.network.vit import VisionTransformer
from model.prediction import MapRequest
from model.runtime.backend import Images, first_line
from model.runtime.batches import BatchOutputs, BatchRequest, launch_size
from model.runtime.compilation import CompilationState, compiled_for_any_batch, twin_for_any_batch
from model.runtime.cuda.batch_launcher import BatchLauncher, CaptureFailed, DeviceOps, DeviceOutputs
from model.runtime.device import batch_too_large
from model.runtime.postprocess import beside, pack, run_network, unpack
from model.runtime.torch_backend import TorchBackend, TorchOptions

logger = logging.getLogger(__name__)

_CAPTURED_TOP_K: Final = 32
"""Most classes that a captured graph returns; a request for more is computed without one."""


class _Compute(NamedTuple):
    """What is done on the device, and with what: see `model.runtime.cuda.batch_launcher.Compute`."""

    normalise: Callable[[Tensor], Tensor]
    model: VisionTransformer
    tail: Callable[[BatchOutputs, int], Tensor]
    folded: FoldedWeights

    def __call__(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Map uint8 [B, H, W, C] on the device to the outputs there."""
        outputs = run_network(self.model, self.normalise(pixels), request, self.folded)
        return self.tail(outputs, request.top_k), beside(outputs)


class Cuda(TorchBackend):
    """Torch on a GPU: everything from normalisation to the top-k runs there, as one CUDA graph a launch size.

    Raises:
        DeviceError: not enough memory for the weights, or the images of the largest batch.
    """

    def __init__(self, options: TorchOptions, ops: DeviceOps, *, streams: int) -> None:
        super().__init__(options)
        self._ops = ops
        self._beside = threading.Lock()  # held by what computes beside the launcher
        self._captured_k = min(_CAPTURED_TOP_K, self.config.num_classes)
        self._uncompiled = _Compute(self._normalise, self._plain, self._tail, self._folded)
        self._compiled: _Compute | None = None
        self._failure: NewProcessNeeded | None = None
        shape, largest = (*self.config.image_size, self.config.in_channels), options.sizes[-1]
        try:
            self._launcher = BatchLauncher(ops, self._compute, shape=shape, max_batch=largest, slots=streams)
        except RuntimeError as error:  # of host memory that cannot be pinned, too
            raise batch_too_large(str(options.device), largest) from error

    def predict(self, images: Images, request: BatchRequest) -> BatchOutputs:
        """See `Backend.predict`; all but the logits comes from the device in one piece.

        Raises:
            NewProcessNeeded: the device was lost to the compilation that went on behind.
        """
        if self._failure is not None:
            raise self._failure
        size = launch_size(len(images), self.batch_sizes)
        request = replace(request, top_k=max(request.top_k, self._captured_k))
        packed, named = self._launcher.run(images, request, size=size)
        return unpack(packed, request, self.config)._replace(**named)

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`; batches go the way that requests go, and the smallest one straight to the model."""
        super().exercise(sizes[:1])
        for size in sizes:
            for turn, request in enumerate(self.usual):
                self.require_finite(_or_nan(self.predict(self.trial_images(size, turn), request)))

    def explain(
        self, images: NDArray[np.uint8], classes: NDArray[np.int64], request: MapRequest
    ) -> tuple[Tensor, Tensor]:
        """See `Backend.explain`."""
        with self._beside:
            return super().explain(images, classes, request)

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        """See `Backend.logits`; they are the compiled model's where there is one."""
        compute = self._compiled or self._uncompiled
        batch = torch.from_numpy(np.ascontiguousarray(images)).to(self._device)
        return run_network(compute.model, compute.normalise(batch), BatchRequest()).tensors()["logits"]

    def compile(self) -> None:
        """Compile, and capture a graph of each launch size, before returning; or compile behind, after capturing.

        Raises:
            NewProcessNeeded: a capture broke off.
            RuntimeError: the device failed meanwhile.
        """
        planned = self.compilation.state is CompilationState.COMPILING
        # Kernels that are timed beside others are chosen by chance.
        behind = planned and self._options.behind and self._options.compile_mode != "max"
        if planned and not behind:
            self._compile()
        if not self._options.graphs:
            self.compilation = replace(self.compilation, graphs="CUDA graphs are off")
        elif self.compilation.state is not CompilationState.OFF:
            self.capture()
        # An error that was no reason to stop above may have left a device on which nothing runs any more.
        self.exercise((1,))
        if behind:
            threading.Thread(target=self._compile_behind, name="compile-behind", daemon=True).start()

    def _compile_behind(self) -> None:
        """Compile while the uncompiled model's graphs answer; graphs of the compiled one take over when all are there.

        A device that is lost to it fails the next batch.
        """
        try:
            try:
                self._compile()
                if self._compiled is not None and self._options.graphs:
                    self.capture()
            except torch.OutOfMemoryError as error:
                self._compilation_failed(error)
            self.exercise((1,))
        except NewProcessNeeded as error:
            self._failure = error
        except (RuntimeError, DeviceError) as error:
            logger.error("the device was lost while the model was compiled: %s", first_line(error))
            self._failure = NewProcessNeeded(f"{self._device}: {first_line(error)}", "compile", "off")

    def capture(self) -> None:
        """Turn each launch size into a graph, of the compiled model or, failing that, of the uncompiled one.

        Raises:
            NewProcessNeeded: a capture broke off.
            torch.OutOfMemoryError: the graphs do not fit.
        """
        started = time.monotonic()
        try:
            sizes = self._options.sizes
            requests = [replace(request, top_k=self._captured_k) for request in self.usual]
            self._launcher.capture(self._compute_to_capture, sizes, requests, beside=self._beside)
        except CaptureFailed as error:
            logger.error("no CUDA graphs: %s", error)
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise batch_too_large(str(self._device), sizes[-1]) from error
            raise NewProcessNeeded(f"{self._device}: {error}", "compile", "no-graphs") from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            which = "no CUDA graphs" if self.batch_sizes is None else "CUDA graphs of the uncompiled model"
            self.compilation = replace(self.compilation, graphs=f"{which}: {first_line(error)}")
            logger.warning("no CUDA graphs: %s", first_line(error))
            return
        self.batch_sizes = self._options.sizes
        uncompiled = "" if self._compiled else "CUDA graphs of the uncompiled model"
        self.compilation = replace(self.compilation, graphs=uncompiled)
        self._log("captured", started)

    def _compute(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Compute where there is no graph, so that neither a compiler nor lasting kernels are waited for."""
        compiled = self._compiled if request.of_network in self.usual and not self._options.graphs else None
        return (compiled or self._uncompiled)(pixels, request)

    def _compute_to_capture(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Compute for a graph; the compiled model does a single image twice, as its code is for two and more."""
        if self._compiled is None:
            return self._uncompiled(pixels, request)
        if len(pixels) > 1:
            return self._compiled(pixels, request)
        packed, others = self._compiled(torch.cat((pixels, pixels)), request)
        return packed[:1], {name: tensor[:1] for name, tensor in others.items()}

    def _compile_and_exercise(self) -> None:
        autotune = self._options.compile_mode == "max"
        twin = twin_for_any_batch(self._plain, autotune=autotune)
        normalise = compiled_for_any_batch(self._normalise.forward, autotune=autotune)
        graphs = self._options.graphs
        # Without graphs any number of classes is computed by it, and would be compiled.
        tail = compiled_for_any_batch(self._tail, autotune=autotune) if graphs else self._tail
        compute = _Compute(normalise, twin, tail, self._folded)

        def scores(images: Tensor, request: BatchRequest) -> Tensor:
            request = replace(request, top_k=self._captured_k)
            packed, _ = compute(images, request)
            return _or_nan(unpack(packed, request, self.config))

        with self._ops.lasting_kernels() if graphs else nullcontext():
            # The largest first: kernels are tuned for what they see first.
            self._exercise(scores, (self._options.sizes[-1], 2))
        self._compiled, self._model = compute, twin

    def _tail(self, outputs: BatchOutputs, top_k: int) -> Tensor:
        """Map the network's outputs to packed outputs, int32 [B, width]."""
        return pack(self.postprocess(outputs, top_k))


def _or_nan(outputs: BatchOutputs) -> Tensor:
    """Return the scores, NaN for an image of which some score, among the best or not, is not finite."""
    assert outputs.scores is not None
    assert outputs.finite is not None
    return outputs.scores.masked_fill(~outputs.finite.unsqueeze(1), torch.nan)
