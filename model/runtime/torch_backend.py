"""The common base of the backends that run the network in torch, on the CPU or on CUDA."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig
from model.errors import DeviceError
from model.explanation.methods import explain_with_mass
from model.network.vit import VisionTransformer, ViTOutput, count_parameters
from model.runtime.backend import first_line, launch_size
from model.runtime.compilation import (
    Compilation,
    CompilationState,
    CompileMode,
    choose_kernels,
    compiled_twin,
    plan_compilation,
)
from model.runtime.postprocess import Postprocess

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """Options that a torch backend is built from.

    Attributes:
        model: float32, on the CPU; moved to the device.
        sizes: batch sizes to compile for, ascending.
    """

    model: VisionTransformer
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    compile_mode: CompileMode
    sizes: tuple[int, ...]


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


class TorchBackend:
    """Holds the network on its device, normalises images for it, and compiles it.

    Attributes:
        usual_layers: choices of attention layers that are compiled and captured: no map, or the default one.

    Raises:
        DeviceError: not enough memory for the weights.
    """

    compiles_embedding = False
    """Whether normalisation and embedding are compiled too, or the blocks alone."""

    def __init__(self, options: TorchOptions) -> None:
        self.name = f"torch {torch.__version__}"
        self.batch_sizes: tuple[int, ...] | None = None
        self.config = options.model.config
        self.usual_layers: tuple[tuple[int, ...], ...] = (), (self.config.depth - 1,)
        self.postprocess = Postprocess(options.checkpoint)
        self.compilation = plan_compilation(options.compile_mode, options.device)
        self._options = options
        self._device = options.device
        choose_kernels(options.model, options.device)
        try:
            self._plain = options.model.to(device=options.device, dtype=options.dtype)
        except torch.OutOfMemoryError as error:
            parameters = count_parameters(options.model)
            raise DeviceError(f"{options.device}: not enough memory for {parameters:,} parameters") from error
        self._model = self._plain
        self._plain_normalise = Normalise(options.checkpoint.preprocess, options.dtype).to(options.device)
        self._normalise: Callable[[Tensor], Tensor] = self._plain_normalise

    def forward(self, images: NDArray[np.uint8], layers: tuple[int, ...]) -> ViTOutput:
        """Return logits and attention rows of uint8 [B, H, W, C] in host memory, on the device."""
        # The model is chosen first: if the compiled one takes over now, this batch is padded for nothing, no more.
        model, count = self._model_for(layers), len(images)
        missing = launch_size(count, self.batch_sizes) - count
        if missing:
            images = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)])
        batch = torch.from_numpy(np.ascontiguousarray(images)).to(self._device)
        output: ViTOutput = model(self._normalise(batch), layers)
        return ViTOutput(output.logits[:count], None if output.attention is None else output.attention[:count])

    def explain(self, images: NDArray[np.uint8], classes: NDArray[np.int64], method: str) -> tuple[Tensor, Tensor]:
        """See `Backend.explain`."""
        batch = torch.from_numpy(np.ascontiguousarray(images)).to(self._device)
        wanted = torch.from_numpy(np.ascontiguousarray(classes)).to(self._device)
        maps, kept_mass = explain_with_mass(self._plain, self._plain_normalise(batch), wanted, method)
        return maps.cpu(), kept_mass.cpu()

    def logits(self, images: NDArray[np.uint8]) -> Tensor:
        """See `Backend.logits`."""
        return self.forward(images, ()).logits

    def exercise(self, sizes: Sequence[int]) -> None:
        """See `Backend.exercise`."""
        self._exercise(self._model, self._normalise, sizes)

    def _exercise(self, model: VisionTransformer, normalise: Callable[[Tensor], Tensor], sizes: Sequence[int]) -> None:
        with torch.inference_mode():
            for size in sizes:
                for turn, layers in enumerate(self.usual_layers):
                    images = torch.from_numpy(self.trial_images(size, turn)).to(self._device)
                    self.require_finite(model(normalise(images), layers).logits)

    def fill_caches(self, size: int) -> None:
        """Do nothing: a GPU's allocator keeps what the largest batch took, for all sizes."""

    def trial_images(self, count: int, turn: int) -> NDArray[np.uint8]:
        """Return images [count, H, W, C] that are noise and black in turn; the first one is noise on even turns.

        Neither does for the other: where black normalises to 0, a model answers it whatever its weights are.
        """
        shape = (count, *self.config.image_size, self.config.in_channels)
        images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        images[(turn + 1) % 2 :: 2] = 0
        return images

    def require_finite(self, logits: Tensor) -> None:
        """Raise DeviceError unless all logits are finite."""
        if not logits.isfinite().all():
            dtype = str(self._options.dtype).removeprefix("torch.")
            raise DeviceError(f"{self._device}: warm-up gave scores that are not finite in {dtype}")

    def _model_for(self, layers: tuple[int, ...]) -> VisionTransformer:
        """Return the model to run: the uncompiled one for rows of other layers, as nobody is to wait for a compiler."""
        return self._model if layers in self.usual_layers else self._plain

    def _compile(self) -> None:
        """Compile a twin that shares the weights, run it at every launch size, then let it take over."""
        started = time.monotonic()
        sizes, whole = self._options.sizes, self.compiles_embedding
        autotune = self._options.compile_mode == "max"
        twin = compiled_twin(self._plain, self._device, shapes=len(sizes), autotune=autotune, embedding=whole)
        # What is cheap on a CPU is many small kernels on a GPU: normalising, adding positions, joining tokens.
        normalise = torch.compile(self._normalise, dynamic=False) if whole else self._normalise
        try:
            self._exercise(twin, normalise, sizes)
        except (RuntimeError, OSError) as error:  # what torch.compile raises for its backends and their compilers
            logger.warning("compilation failed, running uncompiled: %s", first_line(error))
            self.compilation = Compilation(CompilationState.FAILED, first_line(error))
            return
        # In this order: a launch that reads the new sizes with the old model is padded for nothing, no more.
        self.batch_sizes = sizes
        self._model, self._normalise = twin, normalise
        self.compilation = Compilation(CompilationState.COMPILED)
        self._log("compiled", started)

    def _log(self, done: str, started: float) -> None:
        sizes = ", ".join(map(str, self._options.sizes))
        logger.info("%s for batches of %s in %.0f s", done, sizes, time.monotonic() - started)
