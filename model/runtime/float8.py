"""FP8 for the linear layers of the blocks, and how often it gives the class that bfloat16 gives."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.torch_version import TorchVersion

from model.config import PreprocessConfig
from model.images.views import square_view
from model.network.layers.block import Mlp
from model.network.layers.float8 import MULTIPLE, Float8Linear
from model.network.vit import VisionTransformer

LEAST_AGREEMENT: Final = 0.99
"""Share of the calibration set that must have the best class of the reference, unless a setting says otherwise."""

LEAST_GAIN: Final = 1.15
"""How many times bfloat16's images a second a GPU must compute for float8 to stay; `benchmarks.gpu` measures it."""

VIEWS: Final = 64
CALIBRATION_SET: Final = f"{VIEWS} views of the two photographs that vitserve brings along"

_CAPABILITY: Final = (8, 9)
_OLDEST_TORCH: Final = "2.12"
_SMALLEST_VIEW: Final = 0.7
"""Share of the photograph's shorter side."""


def unsupported_reason(device: torch.device) -> str | None:
    """Return why float8 is not computed on this device with this torch, or None."""
    least = ".".join(map(str, _CAPABILITY))
    if device.type != "cuda":
        return f"it needs a GPU of compute capability {least} or later, not {device}"
    capability, cuda = torch.cuda.get_device_capability(device), torch.version.cuda or "0"
    if capability < _CAPABILITY:
        own = ".".join(map(str, capability))
        return f"{device} has compute capability {own}, it needs {least} or later"
    if cuda.startswith("12.9"):
        # https://github.com/pytorch/ao/issues/4582
        return "CUDA 12.9 refuses small batches of it, it needs a torch for another CUDA"
    # Products with a scale for each row are CUTLASS's, which older versions launch on the wrong stream
    # (pytorch/pytorch#177651), but for capability 9.0 from cuBLAS 12.9 on: there they are cuBLASLt's.
    by_cublas = capability == (9, 0) and TorchVersion(cuda) > "12.9"
    if not by_cublas and TorchVersion(torch.__version__) < _OLDEST_TORCH:
        return f"torch {torch.__version__} multiplies by rows on the wrong stream, it needs {_OLDEST_TORCH} or later"
    return None


def use_float8(model: VisionTransformer) -> None:
    """Replace the linear layers of the blocks by ones that multiply in FP8; all else stays as it is.

    Args:
        model: on its device, in bfloat16.
    """
    for parent in [module for block in model.blocks for module in block.modules()]:
        for name, layer in list(parent.named_children()):
            # Others stay in bfloat16; no size of a usual model is another multiple.
            if isinstance(layer, nn.Linear) and not (layer.in_features % MULTIPLE or layer.out_features % MULTIPLE):
                setattr(parent, name, Float8Linear(layer))
        if isinstance(parent, Mlp) and isinstance(parent.fc1, Float8Linear):
            parent.fused = False  # that kernel is bfloat16's


@contextmanager
def exact_products(model: VisionTransformer) -> Iterator[None]:
    """Let the model compute in bfloat16 in this context."""
    layers = [module for module in model.modules() if isinstance(module, Float8Linear)]
    for layer in layers:
        layer.exact = True
    try:
        yield
    finally:
        for layer in layers:
            layer.exact = False


def agreement(
    model: VisionTransformer,
    logits: Callable[[NDArray[np.uint8]], NDArray[np.float32]],
    images: NDArray[np.uint8],
    *,
    batch: int,
) -> float:
    """Return the share of images whose best class in FP8 is the one in bfloat16.

    Args:
        model: what `logits` computes with, after `use_float8`.
        logits: uint8 [B, H, W, C] -> [B, num_classes].
        images: uint8 [N, H, W, C].
        batch: most images to compute together.
    """

    def best() -> NDArray[np.int64]:
        parts = [logits(images[start : start + batch]) for start in range(0, len(images), batch)]
        return np.concatenate([part.argmax(axis=1) for part in parts])

    with exact_products(model):
        expected = best()
    return float((best() == expected).mean())


def calibration_images(config: PreprocessConfig, count: int = VIEWS) -> NDArray[np.uint8]:
    """Return the calibration set, or its first images, as the model sees them, uint8 [N, H, W, C], always the same.

    Each is a square of one of two photographs, of 0.7 to 1 of its shorter side, and every other one is mirrored. Noise
    would not do: a trained model is sure of nothing there, and any rounding changes its best class.
    """
    folder = resources.files("model.runtime") / "pictures"
    photographs = [
        Image.open(io.BytesIO((folder / name).read_bytes())).convert("RGB") for name in ("dog.jpg", "harbour.jpg")
    ]
    random = np.random.default_rng(0)
    views = []
    for number in range(count):
        photograph = photographs[number % 2]
        views.append(square_view(photograph, random, config, smallest=_SMALLEST_VIEW, mirrored=number % 4 >= 2))
    return np.stack(views)
