"""The backend that runs the network in torch on a GPU, through the batch launcher and its captured graphs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.errors import DeviceError, NewProcessNeeded, first_line
from model.runtime.backend import (
    WITHOUT_GRAPHS,
    Compilation,
    CompilationState,
    batch_too_large,
    require_close,
    trial_images,
)
from model.runtime.batches import BatchOutputs, BatchRequest, HostOutputs, Images, launch_size
from model.runtime.compilation import Network, compiled_for_any_batch, compiled_network
from model.runtime.cuda.batch_launcher import BatchLauncher, CaptureFailed, Compute, DeviceOps, DeviceOutputs
from model.runtime.postprocess import TopK, beside, on_host, pack, unpack
from model.runtime.torch_backend import TorchBackend, TorchOptions

logger = logging.getLogger(__name__)

_CAPTURED_TOP_K: Final = 32
"""Most classes that a captured graph returns; a request for more is computed without one."""


@dataclass(frozen=True)
class _Compute:
    """What is done on the device, and with what: see `model.runtime.cuda.batch_launcher.Compute`."""

    network: Network
    tail: Callable[[BatchOutputs[Tensor], int], Tensor]

    def __call__(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Map uint8 [B, H, W, C] on the device to the outputs there."""
        outputs = self.network(pixels, request)
        return self.tail(outputs, request.top_k), beside(outputs)


class Cuda(TorchBackend):
    """Torch on a GPU: everything from normalisation to the top-k runs there, as one CUDA graph a launch size.

    Raises:
        DeviceError: not enough memory for the weights, or the images of the largest batch.
    """

    def __init__(self, options: TorchOptions, ops: DeviceOps, *, streams: int) -> None:
        super().__init__(options)
        self._top_k = TopK(options.checkpoint)
        self._captured_k = min(_CAPTURED_TOP_K, self.config.logits)
        self._uncompiled = _Compute(self.network, self._tail)
        self._compiled: _Compute | None = None
        shape, largest = (*self.config.image_size, self.config.in_channels), options.sizes[-1]
        try:
            self._launcher = BatchLauncher(ops, self._compute, shape=shape, max_batch=largest, slots=streams)
        except RuntimeError as error:  # of host memory that cannot be pinned, too
            raise batch_too_large(str(options.device), largest) from error

    @torch.inference_mode()
    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`; all but what is `beside` comes from the device in one piece."""
        return on_host(self._launch(images, request), len(images))

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`; batches go the way that requests go, and the smallest one straight to the model."""
        super().exercise(sizes[:1])
        for size in sizes:
            for turn, request in enumerate(self.usual):
                self.require_finite(_or_nan(self._launch(trial_images(self.config, size, turn), request)))

    @torch.inference_mode()
    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """See `Backend.logits`; they are the compiled model's where there is one."""
        network = (self._compiled or self._uncompiled).network
        return on_host(network(self.upload(images), BatchRequest()), len(images)).tensors()["logits"]

    def fill_caches(self, size: int) -> None:
        """Do nothing: the allocator keeps what the largest batch took, for all sizes."""

    def compile(self) -> None:
        """Compile, capture a graph of each launch size, and compare what they give with the uncompiled network.

        Raises:
            NewProcessNeeded: a capture broke off, or the device is lost.
            torch.OutOfMemoryError: the graphs do not fit.
        """
        if self.compilation.state is CompilationState.COMPILING:
            logger.info("compiling, for minutes at the first start: `vitserve compile` does it beforehand")
            self._compile()
        try:
            if not self._options.graphs:
                self.compilation = replace(self.compilation, graphs="CUDA graphs are off")
            elif self.compilation.state is not CompilationState.OFF:
                self._capture()
            self._require_same_answers()
        except (NewProcessNeeded, torch.OutOfMemoryError):
            raise
        except (DeviceError, RuntimeError) as error:
            self._run_plain(error)

    def _run_plain(self, error: Exception) -> None:
        """Compute uncompiled and without graphs from now on, as what should replace that has failed."""
        logger.error("the model runs uncompiled and without CUDA graphs: %s", first_line(error))
        self._compiled, self.batch_sizes = None, None
        self._launcher.forget_graphs()
        self.compilation = Compilation(CompilationState.FAILED, first_line(error))
        try:
            self.exercise((1,))
        except RuntimeError as lost:  # the device, on which nothing runs any more
            raise NewProcessNeeded(f"{self._device}: {first_line(error)}", "compile", "off") from lost

    def _capture(self) -> None:
        """Turn each launch size into a graph, of the compiled model or, failing that, of the uncompiled one."""
        started, sizes = time.monotonic(), self._options.sizes
        requests = [replace(request, top_k=self._captured_k) for request in self.usual]
        try:
            self._launcher.capture(self._compute_to_capture, sizes, requests)
        except CaptureFailed as error:
            logger.error("no CUDA graphs: %s", error)
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise batch_too_large(str(self._device), sizes[-1]) from error
            raise NewProcessNeeded(f"{self._device}: {error}", "compile", WITHOUT_GRAPHS) from error
        self.batch_sizes = sizes
        if self._compiled is None:
            self.compilation = replace(self.compilation, graphs="CUDA graphs of the uncompiled model")
        self._log("captured", started)

    def _require_same_answers(self) -> None:
        """Compare a batch of each launch size, with and without a map, with the uncompiled network's answer.

        Raises:
            DeviceError: they differ by more than rounding explains.
        """
        for size in self._options.sizes:
            for turn, request in enumerate(replace(usual, logits=True) for usual in self.usual):
                images = trial_images(self.config, size, turn)
                outputs = self._launch(images, request)
                expected = self._launch(images, request, self._uncompiled)
                if not _same_best_class(outputs, expected):  # by rounding, unless the logits are wrong, too
                    outputs = outputs._replace(relevance=None)
                exact, source = self._options.dtype == torch.float32, f"for {size} images the launched model"
                host = (on_host(each, size) for each in (outputs, expected))
                require_close(*host, exact=exact, source=source)

    def _launch(self, images: Images, request: BatchRequest, compute: Compute | None = None) -> BatchOutputs[Tensor]:
        """Return a batch's outputs on the host.

        Args:
            compute: what computes it instead of what computes requests.
        """
        request = replace(request, top_k=max(request.top_k, self._captured_k))
        size = launch_size(len(images), self.batch_sizes)
        packed, named = self._launcher.run(images, request, size=size, compute=compute)
        return unpack(packed, request, self.config)._replace(**named)

    def _compute(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Compute where there is no graph; a request that is not usual waits for no compiler."""
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
        network = compiled_network(self._plain, self._normalise, self._folded)
        # Without graphs any number of classes is computed by it, and would be compiled.
        tail = compiled_for_any_batch(self._tail) if self._options.graphs else self._tail
        compute = _Compute(network, tail)

        def scores(images: Tensor, request: BatchRequest) -> Tensor:
            request = replace(request, top_k=self._captured_k)
            packed, _ = compute(images, request)
            return _or_nan(unpack(packed, request, self.config))

        # The largest first: kernels are tuned for what they see first.
        self._exercise(scores, (self._options.sizes[-1], 2))
        self._compiled = compute

    def _tail(self, outputs: BatchOutputs[Tensor], top_k: int) -> Tensor:
        """Map the network's outputs to packed outputs, int32 [B, width]."""
        return pack(self._top_k(outputs, top_k))


def _same_best_class(*outputs: BatchOutputs[Tensor]) -> bool:
    first, second = (each.tensors()["indices"][:, 0] for each in outputs)
    return torch.equal(first, second)


def _or_nan(outputs: BatchOutputs[Tensor]) -> Tensor:
    """Return the scores, NaN for an image of which some score, among the best or not, is not finite."""
    assert outputs.scores is not None
    assert outputs.finite is not None
    return outputs.scores.masked_fill(~outputs.finite.unsqueeze(1), torch.nan)
