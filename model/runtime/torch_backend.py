"""The common base of the backends that run the network in torch, on the CPU or on CUDA."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.checkpoint import Checkpoint
from model.config import NetworkConfig, PreprocessConfig, ViTConfig
from model.errors import DeviceError, first_line
from model.explanation.folded_weights import fold
from model.explanation.methods import explain
from model.network.layers.attention import Attention
from model.network.layers.rotary import Rotary
from model.network.library import Classifier
from model.network.vit import VisionTransformer, count_parameters
from model.outputs import MapRequest
from model.runtime.backend import Compilation, CompilationState, CompileMode, require_finite, trial_images
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.compilation import choose_kernels, plan_compilation, strict_compiler
from model.runtime.postprocess import run_network

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options that a torch backend is built from.

    Attributes:
        model: float32, on the CPU; moved to the device.
        sizes: batch sizes to compile for, ascending.
        graphs: whether they become CUDA graphs on CUDA.
    """

    model: Classifier
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    compile_mode: CompileMode
    sizes: tuple[int, ...]
    graphs: bool = True

    @property
    def dtype_name(self) -> str:
        """Return what the dtype is called in settings."""
        return str(self.dtype).removeprefix("torch.")


class Normalise(nn.Module):
    """Computes (x/255 - mean) / std in float32, as one multiplication and addition, and gives it in `dtype`."""

    scale: Tensor
    shift: Tensor

    def __init__(self, preprocess: PreprocessConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        std = torch.tensor(preprocess.std, dtype=torch.float64)
        mean = torch.tensor(preprocess.mean, dtype=torch.float64)
        self.register_buffer("scale", (1 / (255 * std)).float().reshape(1, -1, 1, 1))
        self.register_buffer("shift", (-mean / std).float().reshape(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 [B, H, W, C] to the dtype, [B, C, H, W]."""
        pixels = images.permute(0, 3, 1, 2).float()
        return (pixels * self.scale + self.shift).to(self.dtype)


class TorchBackend(ABC):
    """Holds the network on its device, normalises images for it, and compiles it.

    Attributes:
        usual: requests whose part of the network is compiled and captured: no map, or one of the defaults.

    Raises:
        DeviceError: not enough memory for the weights.
    """

    def __init__(self, options: TorchOptions) -> None:
        self.name = f"torch {torch.__version__}"
        self.batch_sizes: tuple[int, ...] | None = None
        self.config: NetworkConfig = options.model.config
        self.usual: tuple[BatchRequest, ...] = (BatchRequest(),)
        if isinstance(self.config, ViTConfig):
            self.usual += BatchRequest(layers=(self.config.depth - 1,)), BatchRequest(relevance=True)
        self.compilation = plan_compilation(options.compile_mode, options.device)
        self._options = options
        self._device = options.device
        choose_kernels(options.model, options.device, options.dtype)
        for module in options.model.modules():
            if isinstance(module, Rotary):
                module.fix()
        try:
            self._plain = options.model.to(device=options.device, dtype=options.dtype)
            self._folded = fold(self._plain) if isinstance(self._plain, VisionTransformer) else None
        except torch.OutOfMemoryError as error:
            parameters = count_parameters(options.model)
            raise DeviceError(f"{options.device}: not enough memory for {parameters:,} parameters") from error
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

    def explain(
        self, images: NDArray[np.uint8], targets: NDArray[np.int64] | NDArray[np.float32], request: MapRequest
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Backend.explain`."""
        assert isinstance(self._plain, VisionTransformer), "of others no map is asked for: see `parse_maps`"
        maps, kept_mass = explain(self._plain, self._normalise(self.upload(images)), self.upload(targets), request)
        return maps.numpy(), kept_mass.numpy()

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`."""
        self._exercise(lambda pixels, request: self.network(pixels, request).tensors()["logits"], sizes)

    def _exercise(self, compute: Callable[[Tensor, BatchRequest], Tensor], sizes: Sequence[int]) -> None:
        """Run (images on the device, request) -> logits or scores with trial images of these sizes."""
        with torch.inference_mode():
            for size in sizes:
                for turn, request in enumerate(self.usual):
                    self.require_finite(compute(self.upload(trial_images(self.config, size, turn)), request))

    def defers(self, request: BatchRequest) -> bool:
        """See `Backend.defers`: all is loaded."""
        return False

    def require_finite(self, values: Tensor) -> None:
        """Raise NotFinite unless all logits or scores are finite."""
        require_finite(values.float().cpu().numpy(), str(self._device), self._options.dtype_name)

    def _compile(self) -> None:
        """Compile a network that shares the weights, run it, then let it take over."""
        started = time.monotonic()
        try:
            with strict_compiler():
                self._compile_and_exercise()
        except torch.OutOfMemoryError:
            raise
        # Compilers, their processes and the kernels' own launcher raise what they like, often plain exceptions.
        except Exception as error:  # noqa: BLE001
            logger.warning("compilation failed, running uncompiled: %s", first_line(error))
            self.compilation = Compilation(CompilationState.FAILED, first_line(error))
            return
        self.compilation = replace(self.compilation, state=CompilationState.COMPILED)
        self._log("compiled", started)

    @abstractmethod
    def _compile_and_exercise(self) -> None:
        """Compile, and run what was compiled; it raises whatever the compiler raises."""

    def _log(self, done: str, started: float) -> None:
        sizes = ", ".join(map(str, self._options.sizes))
        logger.info("%s for batches of %s in %.0f s", done, sizes, time.monotonic() - started)
