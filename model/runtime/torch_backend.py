"""The backends that run the network in torch: their common base, and the one on the CPU."""

import logging
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint import Checkpoint
from model.config import NetworkConfig, ViTConfig
from model.errors import DeviceError, first_line
from model.explanation.explain import explain
from model.explanation.folded_weights import fold
from model.network.layers.attention import Attention, chunked_attention
from model.network.layers.patch_embed import PatchEmbed
from model.network.layers.rotary import Rotary
from model.network.library import Classifier
from model.network.vit import VisionTransformer
from model.outputs import TRANSFER, MapRequest, Pooling, RequestedOutputs
from model.runtime.backend import (
    SIZES,
    Aim,
    Backend,
    BatchOutputs,
    BatchRequest,
    Compilation,
    CompilationState,
    CompileMode,
    HostOutputs,
    Images,
    ThreadPolicy,
    compute_in_pieces,
    stacked,
    trial_images,
    with_best,
)
from model.runtime.cpu import keep_freed_memory
from model.runtime.torch_pass import (
    Network,
    Normalise,
    compiled_network,
    on_host,
    plan_compilation,
    run_network,
)

logger = logging.getLogger(__name__)

# How often a function may be compiled in a process: dynamo's own limit over all of a function's
# callers.
_RECOMPILE_LIMIT: Final = 256


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options that a torch backend is built from.

    Attributes:
        model: float32, on the CPU; moved to the device.
        sizes: batch sizes to launch on CUDA, ascending.
        graphs: whether they become CUDA graphs.
        transfer: whether transfer features are compiled and captured too, for a service that is
        taught.
    """

    model: Classifier
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    compile_mode: CompileMode
    sizes: tuple[int, ...]
    graphs: bool = True
    transfer: bool = False

    @property
    def dtype_name(self) -> str:
        """Return what the dtype is called in settings."""
        return str(self.dtype).removeprefix("torch.")


def choose_kernels(model: Classifier, device: torch.device) -> None:
    """Replace the kernels that are slow on the device by equivalent ones, for weights that change
    no more.
    """
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fix()
        elif isinstance(module, Attention) and device.type == "cpu":
            module.attend = chunked_attention
        elif isinstance(module, PatchEmbed):
            module.as_product = device.type == "cuda"


class TorchBackend(Backend):
    """Holds the network on its device, normalises images for it, and compiles it.

    Raises:
        DeviceError: not enough memory for the weights.
    """

    def __init__(self, options: TorchOptions) -> None:
        self.name = f"torch {torch.__version__}"
        self.config: NetworkConfig = options.model.config
        self.usual: tuple[BatchRequest, ...] = (BatchRequest(),)
        if isinstance(self.config, ViTConfig):
            self.usual += (
                BatchRequest(layers=(self.config.depth - 1,)),
                BatchRequest(relevance=True),
            )
            if options.transfer:
                self.usual += (
                    BatchRequest.of(
                        [RequestedOutputs(1, embedding=TRANSFER)], self.config
                    ).of_network,
                )
        self.compilation = plan_compilation(options.compile_mode, options.device)
        self._options = options
        self._device, self._head = options.device, options.checkpoint.head
        choose_kernels(options.model, options.device)
        try:
            self._plain = options.model.to(device=options.device, dtype=options.dtype)
            self._folded = fold(self._plain) if isinstance(self._plain, VisionTransformer) else None
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{options.device}: not enough memory for the weights") from error
        for module in self._plain.modules():
            if isinstance(module, Attention):
                module.fix_bias()
        self._normalise = Normalise(options.checkpoint.preprocess, options.dtype).to(options.device)

    def network(self, pixels: Tensor, request: BatchRequest) -> BatchOutputs[Tensor]:
        """Return the output of the uncompiled network for uint8 [B, H, W, C] on the device."""
        return run_network(self._plain, self._normalise(pixels), request, self._folded)

    def upload(self, values: NDArray[Any]) -> Tensor:
        """Return images, or other values, on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    @torch.inference_mode()
    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """See `Backend.aim`."""
        pixels = self._normalise(self.upload(stacked(images)))
        outputs = on_host(run_network(self._plain, pixels, request, self._folded, aims))
        return with_best(outputs, self._head, request.top_k)

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[np.int64] | NDArray[np.float32],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`."""
        assert isinstance(self._plain, VisionTransformer), (
            "of others no map is asked for: see `parse_maps`"
        )
        pixels = self._normalise(self.upload(images))
        maps, kept_mass = explain(
            self._plain, pixels, self.upload(targets), request, self._folded, features
        )
        return maps.numpy(), kept_mass.numpy()

    def compile(self) -> None:
        """See `Backend.compile`: compile a network that shares the weights, and let it take over."""
        self.compilation = self.compile_network()

    def compile_network(self) -> Compilation:
        """Compile a network that shares the weights, and return how that went; see
        `_take_compiled`.
        """
        if self.compilation.state is not CompilationState.COMPILING:
            return self.compilation
        logger.info("compiling, for minutes at the first start")
        started = time.monotonic()
        try:
            # By default torch compiles a function eight times, and from then on runs it uncompiled
            # in silence. Several models, kinds of block and batch sizes need more.
            with (
                torch._dynamo.config.patch(
                    recompile_limit=_RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True
                ),
                torch.inference_mode(),
            ):
                self._take_compiled()
        except torch.OutOfMemoryError:
            raise
        # Compilers, their processes and the kernels' own launcher raise what they like, often plain
        # exceptions.
        except Exception as error:  # noqa: BLE001
            logger.warning("compilation failed, running uncompiled: %s", first_line(error))
            return Compilation(CompilationState.FAILED, first_line(error))
        logger.info("compiled in %.0f s", time.monotonic() - started)
        return replace(self.compilation, state=CompilationState.COMPILED)

    @abstractmethod
    def _take_compiled(self) -> None:
        """Compile, and run what was compiled; it raises whatever the compiler raises."""


class TorchCpu(TorchBackend):
    """Torch on the CPU.

    The process's heap is told to keep what a pass frees: see `keep_freed_memory`.
    """

    def __init__(self, options: TorchOptions, threads: ThreadPolicy) -> None:
        super().__init__(options)
        keep_freed_memory()
        self.largest_tried = SIZES[-1]  # larger ones are cut
        self.threads = threads
        self._compiled: Network | None = None

    @torch.inference_mode()
    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        """See `Backend.predict`."""
        network: Network = self.network
        sizes: Sequence[int] = range(1, SIZES[-1] + 1)
        if self._compiled is not None and request.of_network in self.usual:
            network, sizes = self._compiled, SIZES
        with self.threads as alone:
            torch.set_num_threads(self.threads.count if alone else 1)  # of the calling thread
            outputs = compute_in_pieces(
                stacked(images), lambda piece: on_host(network(self.upload(piece), request)), sizes
            )
            return with_best(outputs, self._head, request.top_k)

    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """See `Backend.aim`; it takes one thread, as `explain`."""
        with self.threads:
            torch.set_num_threads(1)  # of the calling thread
            return super().aim(images, request, aims)

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[np.int64] | NDArray[np.float32],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`; it takes one thread, and leaves the others to the batches that are
        classified.
        """
        with self.threads:
            torch.set_num_threads(1)  # of the calling thread
            return super().explain(images, targets, request, features)

    def _take_compiled(self) -> None:
        compiled = compiled_network(self._plain, self._normalise, self._folded, any_batch=False)
        for size in reversed(SIZES):
            for request in self.usual:
                compiled(self.upload(trial_images(self.config, size)), request)
        self._compiled = compiled
