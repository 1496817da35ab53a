"""The backend that runs the network in torch on a GPU, with the batch launcher's CUDA graphs."""

import logging
import threading
import time
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from model.errors import DeviceError, NewProcessNeeded, first_line
from model.heads import SOFTMAX, Head
from model.runtime.backend import (
    WITHOUT_GRAPHS,
    Compilation,
    CompilationState,
    HostOutputs,
    Images,
    batch_too_large,
)
from model.runtime.batch_request import BatchRequest
from model.runtime.batch_sizes import launch_size
from model.runtime.cuda.batch_launcher import BatchLauncher, CaptureFailed, Compute, DeviceOps
from model.runtime.torch_backend import TorchBackend, TorchOptions
from model.runtime.torch_pass import DeviceOutputs, Network, compiled_network, on_host
from model.runtime.trial import noise_images, require_close, trial_images

logger = logging.getLogger(__name__)

# Held while a model compiles: a compiler waits for the device, which breaks off captures of all
# models in the process.
_COMPILING: Final = threading.Lock()

# Most classes that a captured graph returns; a request for more is computed without a graph.
_CAPTURED_TOP_K: Final = 32


class Cuda(TorchBackend):
    """Torch on a GPU, with one CUDA graph per launch size.

    Everything from normalisation to the top-k of the checkpoint's own head runs in the graph.

    Raises:
        DeviceError: there is not enough memory for the weights, or for the images of the largest
            batch.
    """

    def __init__(self, options: TorchOptions, ops: DeviceOps, *, streams: int) -> None:
        if options.dtype == torch.float32:
            # The switch affects the whole process, and is never turned back. Other models of the
            # process are not affected: their convolutions in bfloat16 and float16 do not use TF32.
            torch.backends.cudnn.allow_tf32 = False
        super().__init__(options)
        self._head = options.checkpoint.head
        self._captured_k = min(_CAPTURED_TOP_K, self.config.logits)
        self._compiled: Network | None = None
        self._is_verified = False
        self.compiles_beside = self.compilation.state is CompilationState.COMPILING
        shape = (*self.config.image_size, self.config.in_channels)
        largest = options.sizes[-1]
        try:
            self._launcher = BatchLauncher(
                ops, self._compute, shape=shape, max_batch=largest, slots=streams
            )
        except RuntimeError as error:  # also if host memory cannot be pinned
            raise batch_too_large(str(options.device), largest) from error

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        if not self._is_verified:
            return self._launch(images, request, self._uncompiled)
        return self._launch(images, request)

    def covers(self, request: BatchRequest) -> bool:
        """See `Backend.covers`."""
        return self.batch_sizes is None or request.network_part in self.usual

    def compile(self) -> None:
        """Compile, capture a graph of each launch size, and compare it with the uncompiled network.

        Until all of that is done, batches are computed uncompiled and without graphs.

        Raises:
            NewProcessNeeded: a capture failed, or the device is lost.
            torch.OutOfMemoryError: the graphs do not fit.
        """
        with _COMPILING:
            self._compile()

    def _compile(self) -> None:
        outcome = self.compile_network()
        is_captured = False
        try:
            if not self._options.graphs:
                outcome = replace(outcome, graphs="CUDA graphs are off")
            elif outcome.state is not CompilationState.OFF:
                self._capture()
                is_captured = True
                if self._compiled is None:
                    outcome = replace(outcome, graphs="CUDA graphs of the uncompiled model")
            self._require_same_answers()
        except (NewProcessNeeded, torch.OutOfMemoryError):
            raise
        except (DeviceError, RuntimeError) as error:
            self._run_plain(error)
        else:
            if is_captured:
                self.batch_sizes = self._options.sizes
            self._is_verified = True
            self.compilation = outcome

    def _run_plain(self, error: Exception) -> None:
        """Compute uncompiled and without graphs from now on, because compiling has failed."""
        logger.error("the model runs uncompiled and without CUDA graphs: %s", first_line(error))
        self._compiled = None
        self._launcher.forget_graphs()
        self.compilation = Compilation(CompilationState.FAILED, first_line(error))
        try:
            self._launch(trial_images(self.config, 1), BatchRequest())
        except RuntimeError as lost:  # the device no longer runs anything
            raise NewProcessNeeded(
                f"{self._device}: {first_line(error)}", "compile", "off"
            ) from lost

    def _capture(self) -> None:
        """Capture each launch size, of the compiled model or else of the uncompiled one."""
        started = time.monotonic()
        sizes = self._options.sizes
        requests = [replace(request, top_k=self._captured_k) for request in self.usual]
        try:
            self._launcher.capture(self._scored, sizes, requests)
        except CaptureFailed as error:
            logger.error("no CUDA graphs: %s", error)
            if isinstance(error.__cause__, torch.OutOfMemoryError):
                raise batch_too_large(str(self._device), sizes[-1]) from error
            raise NewProcessNeeded(f"{self._device}: {error}", "compile", WITHOUT_GRAPHS) from error
        logger.info(
            "captured for batches of %s in %.0f s",
            ", ".join(map(str, sizes)),
            time.monotonic() - started,
        )

    def _require_same_answers(self) -> None:
        """Compare each launch size, with and without a map, with the uncompiled network.

        Raises:
            DeviceError: outputs differ by more than rounding explains.
        """
        shape = (*self.config.image_size, self.config.in_channels)
        for size in self._options.sizes:
            for turn, usual in enumerate(self.usual):
                request = replace(usual, logits=True)
                if usual.transfer:
                    request = replace(request, embeddings=("transfer",))
                images = noise_images(size, shape, seed=turn)
                require_close(
                    self._launch(images, request),
                    self._launch(images, request, self._uncompiled),
                    exact=self._options.dtype == torch.float32,
                    source=f"for {size} images the launched model",
                )

    @torch.inference_mode()
    def _launch(
        self, images: Images, request: BatchRequest, compute: Compute | None = None
    ) -> HostOutputs:
        """Compute a batch and return its outputs on the host.

        Args:
            images: see `Backend.predict`.
            request: see `Backend.predict`.
            compute: function that computes the batch instead of its graph.
        """
        request = replace(request, top_k=max(request.top_k, self._captured_k))
        size = launch_size(len(images), self.batch_sizes)
        return on_host(self._launcher.run(images, request, size=size, compute=compute))

    def _compute(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Compute a request without a graph; the compiler handles only usual requests."""
        if request.network_part in self.usual and not self._options.graphs:
            return self._scored(pixels, request)
        return self._uncompiled(pixels, request)

    def _uncompiled(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        return with_best(self.network(pixels, request), self._head, request.top_k)

    def _scored(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        network = self._compiled or self.network
        return with_best(network(pixels, request), self._head, request.top_k)

    def _take_compiled(self) -> None:
        compiled = compiled_network(self._plain, self._normalise, self._folded, any_batch=True)
        # The largest first, because kernels are tuned for the first size that they see.
        for size in (self._options.sizes[-1], 2):
            for turn, request in enumerate(self.usual):
                compiled(self.upload(trial_images(self.config, size, turn)), request)
        self._compiled = compiled


def with_best(outputs: DeviceOutputs, head: Head, top_k: int) -> DeviceOutputs:
    """Rank the `top_k` best classes on the device, by the rule of `Head.best_classes`.

    Args:
        outputs: the network's, with logits.
        head: the checkpoint's own.
        top_k: number of classes.
    """
    logits = outputs["logits"].float()
    scores = _scores(logits, head)
    # One NaN logit makes all scores of a softmax NaN, but only one score of sigmoids. So a finite
    # best score does not prove that the others are finite.
    finite = scores.isfinite().all(dim=-1)
    # Classes are ranked by logits, because several saturated sigmoids have a score of 1. If
    # logits are equal, which is frequent in bfloat16, the first is best; `topk` leaves that open.
    indices = logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    best = {"scores": scores.gather(1, indices), "indices": indices, "finite": finite}
    return outputs | best


def _scores(logits: Tensor, head: Head) -> Tensor:
    """Return `Head.scores` of logits on the device."""
    scaled = logits / head.temperature
    if head.form != SOFTMAX:  # see `Form.negative_log_scores`
        below = scaled.amax(dim=-1, keepdim=True) - scaled
        crowd = (-below).exp().sum(dim=-1, keepdim=True)
        scaled = -((below * crowd**head.form.crowding) ** head.form.power)
    return scaled.sigmoid() if head.independent else scaled.softmax(dim=-1)
