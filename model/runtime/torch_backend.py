"""The base of the backends that run the network in torch, and the backend for a CPU."""

import logging
import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final, Self

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
from model.outputs import MapRequest, Pooling
from model.runtime.backend import (
    Aim,
    Backend,
    Compilation,
    CompilationState,
    CompileMode,
    HostOutputs,
    Images,
    stacked,
)
from model.runtime.batch_request import BatchRequest
from model.runtime.batch_sizes import SIZES, compute_in_pieces
from model.runtime.cpu import ThreadPolicy, keep_freed_memory
from model.runtime.torch_pass import (
    DeviceOutputs,
    Network,
    Normalise,
    compiled_network,
    on_host,
    plan_compilation,
    run_network,
)
from model.runtime.trial import trial_images

logger = logging.getLogger(__name__)

# How often a function may be compiled in a process, over all of its callers.
RECOMPILE_LIMIT: Final = 256


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options that a torch backend is built from.

    Attributes:
        model: the network in float32, on the CPU; it is moved to the device.
        checkpoint: the model.
        device: device of the computation.
        dtype: dtype of the computation.
        compile_mode: see `PredictorOptions`.
        sizes: batch sizes to launch on CUDA, ascending.
        graphs: whether they become CUDA graphs.
        transfer: whether transfer features are compiled and captured, too, for a service that
            fits heads to them.
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
        """Return the name of the dtype in settings."""
        return str(self.dtype).removeprefix("torch.")


def choose_kernels(model: Classifier, device: torch.device) -> None:
    """Replace kernels that are slow on the device by equivalent ones, once weights are final."""
    for module in model.modules():
        if isinstance(module, Rotary):
            module.fix()
        elif isinstance(module, Attention) and device.type == "cpu":
            module.attend = chunked_attention
        elif isinstance(module, PatchEmbed):
            module.as_product = device.type == "cuda"


def _usual_requests(config: NetworkConfig, *, transfer: bool) -> tuple[BatchRequest, ...]:
    """Return the requests that the network is compiled and captured for."""
    plain = BatchRequest()
    if not isinstance(config, ViTConfig):
        return (plain,)
    usual: tuple[BatchRequest, ...] = (
        plain,
        BatchRequest(layers=(config.depth - 1,)),
        BatchRequest(relevance=True),
    )
    if transfer:
        usual += (replace(BatchRequest.of_graph("transfer", config), layers=()),)
    return usual


class TorchBackend(Backend):
    """Holds the network on its device, normalises images for it, and compiles it.

    Raises:
        DeviceError: there is not enough memory for the weights.
    """

    def __init__(self, options: TorchOptions) -> None:
        self.name = f"torch {torch.__version__}"
        self.config: NetworkConfig = options.model.config
        self.usual = _usual_requests(self.config, transfer=options.transfer)
        self.compilation = plan_compilation(options.compile_mode, options.device)
        self._options = options
        self._device = options.device
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

    def network(self, pixels: Tensor, request: BatchRequest) -> DeviceOutputs:
        """Return the output of the uncompiled network for uint8 [B, H, W, C] on the device."""
        return run_network(self._plain, self._normalise(pixels), request, self._folded)

    def upload(self, values: NDArray[Any]) -> Tensor:
        """Return images, or other values, on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def load_torch(self) -> Self:
        """See `Backend.load_torch`."""
        return self

    def explaining(self) -> AbstractContextManager[object]:
        """Return the context of aims and explanations."""
        return nullcontext()

    @torch.inference_mode()
    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        """See `TorchPasses.aim`."""
        with self.explaining():
            pixels = self._normalise(self.upload(stacked(images)))
            return on_host(run_network(self._plain, pixels, request, self._folded, aims))

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[np.int64] | NDArray[np.float32],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `TorchPasses.explain`."""
        assert isinstance(self._plain, VisionTransformer), "`parse_maps` refuses other networks"
        with self.explaining():
            pixels = self._normalise(self.upload(images))
            maps, kept_mass = explain(
                self._plain, pixels, self.upload(targets), request, self._folded, features
            )
            return maps.numpy(), kept_mass.numpy()

    def compile(self) -> None:
        """See `Backend.compile`; the compiled network shares the weights and takes over."""
        self.compilation = self.compile_network()

    def compile_network(self) -> Compilation:
        """Compile a network that shares the weights, and return the outcome."""
        if self.compilation.state is not CompilationState.COMPILING:
            return self.compilation
        logger.info("compiling, for minutes at the first start")
        started = time.monotonic()
        try:
            # By default torch compiles a function eight times, and then silently runs it
            # uncompiled. Several models, kinds of block and batch sizes need more.
            with (
                torch._dynamo.config.patch(
                    recompile_limit=RECOMPILE_LIMIT, fail_on_recompile_limit_hit=True
                ),
                torch.inference_mode(),
            ):
                self._take_compiled()
        except torch.OutOfMemoryError:
            raise
        # Compilers, their processes and the kernels' launcher raise many types, often plain
        # exceptions.
        except Exception as error:  # noqa: BLE001
            logger.warning("compilation failed, running uncompiled: %s", first_line(error))
            return Compilation(CompilationState.FAILED, first_line(error))
        logger.info("compiled in %.0f s", time.monotonic() - started)
        return replace(self.compilation, state=CompilationState.COMPILED)

    @abstractmethod
    def _take_compiled(self) -> None:
        """Compile, run the compiled network and use it; raise the compiler's errors."""


class TorchCpu(TorchBackend):
    """Torch on the CPU.

    It makes the process's heap keep freed memory: see `keep_freed_memory`.
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
        if self._compiled is not None and request.network_part in self.usual:
            network = self._compiled
            sizes = SIZES
        with self.threads as alone:
            torch.set_num_threads(self.threads.count if alone else 1)  # of the calling thread
            return compute_in_pieces(
                stacked(images), lambda piece: on_host(network(self.upload(piece), request)), sizes
            )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Count the pass as a batch, on one thread; the others are for classification."""
        with self.threads:
            torch.set_num_threads(1)  # of the calling thread
            yield

    def _take_compiled(self) -> None:
        compiled = compiled_network(self._plain, self._normalise, self._folded, any_batch=False)
        for size in reversed(SIZES):
            for request in self.usual:
                compiled(self.upload(trial_images(self.config, size)), request)
        self._compiled = compiled
