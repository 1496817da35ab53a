"""From uint8 pixels to what the network takes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model.config import PreprocessConfig


class Normalise(nn.Module):
    """Computes (x/255 - mean) / std in float32, folded into one multiplication and addition.

    Args:
        preprocess: says mean and std, one a channel.
        dtype: of what the network takes.
    """

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
        """uint8 [B, H, W, C] -> the dtype [B, C, H, W]."""
        pixels = images.permute(0, 3, 1, 2).float()
        return (pixels * self.scale + self.shift).to(self.dtype)
