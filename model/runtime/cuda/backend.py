"""The backend that runs the network in torch on a GPU, through the batch launcher and its captured
graphs.
"""

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
    BatchOutputs,
    BatchRequest,
    Compilation,
    CompilationState,
    HostOutputs,
    Images,
    batch_too_large,
    launch_size,
    noise_images,
    require_close,
    trial_images,
)
from model.runtime.cuda.batch_launcher import BatchLauncher, CaptureFailed, Compute, DeviceOps
from model.runtime.torch_backend import TorchBackend, TorchOptions
from model.runtime.torch_pass import Network, compiled_network, on_host

logger = logging.getLogger(__name__)

# A compiler waits for the device, which breaks off a capture of any model of the process.
_COMPILING: Final = threading.Lock()

# Most classes that a captured graph returns; a request for more is computed without one.
_CAPTURED_TOP_K: Final = 32


class Cuda(TorchBackend):
    """Torch on a GPU: everything from normalisation to the top-k runs there, as one CUDA graph a
    launch size.

    Raises:
        DeviceError: not enough memory for the weights, or the images of the largest batch.
    """

    def __init__(self, options: TorchOptions, ops: DeviceOps, *, streams: int) -> None:
        if options.dtype == torch.float32:
            # The switch is of the whole process, and is never turned back. Other models of the
            # process lose nothing: in bfloat16 and float16 their convolutions are not float32's.
            torch.backends.cudnn.allow_tf32 = False
        super().__init__(options)
        self._captured_k = min(_CAPTURED_TOP_K, self.config.logits)
        self._compiled: Network | None = None
        self._is_verified = False
        self.compiles_beside = self.compilation.state is CompilationState.COMPILING
        shape, largest = (*self.config.image_size, self.config.in_channels), options.sizes[-1]
        try:
            self._launcher = BatchLauncher(
                ops, self._compute, shape=shape, max_batch=largest, slots=streams
            )
        except RuntimeError as error:  # of host memory that cannot be pinned, too
            raise batch_too_large(str(options.device), largest) from error

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        return self._launch(images, request, None if self._is_verified else self._uncompiled)

    def covers(self, request: BatchRequest) -> bool:
        """See `Backend.covers`."""
        return self.batch_sizes is None or request.of_network in self.usual

    def compile(self) -> None:
        """Compile, capture a graph of each launch size, and compare what they give with the
        uncompiled network.

        Batches are computed uncompiled and without graphs until all of that is done.

        Raises:
            NewProcessNeeded: a capture broke off, or the device is lost.
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
        """Compute uncompiled and without graphs from now on, as what should replace that has
        failed.
        """
        logger.error("the model runs uncompiled and without CUDA graphs: %s", first_line(error))
        self._compiled = None
        self._launcher.forget_graphs()
        self.compilation = Compilation(CompilationState.FAILED, first_line(error))
        try:
            self._launch(trial_images(self.config, 1), BatchRequest())
        except RuntimeError as lost:  # the device, on which nothing runs any more
            raise NewProcessNeeded(
                f"{self._device}: {first_line(error)}", "compile", "off"
            ) from lost

    def _capture(self) -> None:
        """Turn each launch size into a graph, of the compiled model or, failing that, of the
        uncompiled one.
        """
        started, sizes = time.monotonic(), self._options.sizes
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
        """Compare a batch of each launch size, with and without a map, with the uncompiled
        network's answer.

        Raises:
            DeviceError: they differ by more than rounding explains.
        """
        for size in self._options.sizes:
            for turn, usual in enumerate(self.usual):
                request = replace(
                    usual, logits=True, embeddings=("transfer",) if usual.transfer else ()
                )
                images = noise_images(
                    size, (*self.config.image_size, self.config.in_channels), seed=turn
                )
                outputs = self._launch(images, request)
                expected = self._launch(images, request, self._uncompiled)
                exact, source = (
                    self._options.dtype == torch.float32,
                    f"for {size} images the launched model",
                )
                require_close(outputs, expected, exact=exact, source=source)

    @torch.inference_mode()
    def _launch(
        self, images: Images, request: BatchRequest, compute: Compute | None = None
    ) -> HostOutputs:
        """Return a batch's outputs on the host.

        Args:
            compute: what computes it instead of what computes requests.
        """
        request = replace(request, top_k=max(request.top_k, self._captured_k))
        size = launch_size(len(images), self.batch_sizes)
        return on_host(
            BatchOutputs.of(self._launcher.run(images, request, size=size, compute=compute))
        )

    def _compute(self, pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        """Compute where there is no graph; a request that is not usual waits for no compiler."""
        compiled = request.of_network in self.usual and not self._options.graphs
        return self._scored(pixels, request) if compiled else self._uncompiled(pixels, request)

    def _uncompiled(self, pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        return with_best(self.network(pixels, request), self._head, request.top_k).tensors()

    def _scored(self, pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        network = self._compiled or self.network
        return with_best(network(pixels, request), self._head, request.top_k).tensors()

    def _take_compiled(self) -> None:
        compiled = compiled_network(self._plain, self._normalise, self._folded, any_batch=True)
        # The largest first: kernels are tuned for what they see first.
        for size in (self._options.sizes[-1], 2):
            for turn, request in enumerate(self.usual):
                compiled(self.upload(trial_images(self.config, size, turn)), request)
        self._compiled = compiled


def with_best(outputs: BatchOutputs[Tensor], head: Head, top_k: int) -> BatchOutputs[Tensor]:
    """Return the outputs of a network with the `top_k` best classes of each image, by the rule of
    `Head.best`.
    """
    assert outputs.logits is not None
    logits = outputs.logits.float()
    scaled = logits / head.temperature
    if head.form != SOFTMAX:  # see `Form.falls`
        below = scaled.amax(dim=-1, keepdim=True) - scaled
        scaled = -(
            (below * (-below).exp().sum(dim=-1, keepdim=True) ** head.form.crowding)
            ** head.form.power
        )
    scores = scaled.sigmoid() if head.independent else scaled.softmax(dim=-1)
    # A row with one NaN is all NaN after the softmax; a sigmoid keeps it in its place.
    finite = scores.isfinite().all(dim=-1)
    # Logits are ranked, as of saturated sigmoids several are 1; of equal ones, many in bfloat16,
    # the first is best, and `topk` leaves open which of them it takes.
    indices = logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    return outputs._replace(scores=scores.gather(1, indices), indices=indices, finite=finite)
