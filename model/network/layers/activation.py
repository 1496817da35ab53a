"""Activations by their names in `model.config.Activation`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.config import Activation


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x), the approximation of GELU that OpenAI's CLIP was trained with."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Final[dict[Activation, Callable[[Tensor], Tensor]]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}
