"""Patch embeddings, which turn pixels into tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers.resnet import ResNetV2


class PatchEmbed(nn.Module):
    """Non-overlapping patches, each through the same linear map: a convolution with stride = kernel.

    With a stem (`ViTConfig.stem`) the patches are those of the ResNet's last feature map.

    Attributes:
        as_product: compute the convolution as one matrix product over flattened patches.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        channels, patch = config.in_channels, config.patch_size
        self.as_product = False
        self.backbone: nn.Module | None = None
        if config.stem is not None:
            self.backbone = ResNetV2(config.stem, config.in_channels)
            channels, patch = config.stem.channels, config.patch_size // config.stem.stride
        self.proj = nn.Conv2d(channels, config.width, kernel_size=patch, stride=patch, bias=config.patch_bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, gh*gw, D], row by row."""
        if self.backbone is not None:
            pixels = self.backbone(pixels)
        if self.as_product:
            weight = self.proj.weight
            return F.linear(_flat_patches(pixels, weight.shape[-1]), weight.flatten(1), self.proj.bias)
        x: Tensor = self.proj(pixels)
        return x.flatten(2).transpose(1, 2)


class LinearPatchEmbed(nn.Module):
    """A patch embedding as one matrix product over flattened patches (channels, then rows, then columns)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        self.proj = nn.Linear(config.in_channels * config.patch_size**2, config.width, bias=config.patch_bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, gh*gw, D], row by row."""
        return F.linear(_flat_patches(pixels, self.patch_size), self.proj.weight, self.proj.bias)


def _flat_patches(pixels: Tensor, patch: int) -> Tensor:
    """Map [B, C, H, W] to [B, gh*gw, C*patch*patch]; rows and columns that fill no patch are left out."""
    batch, channels, height, width = pixels.shape
    rows, columns = height // patch, width // patch
    pixels = pixels[:, :, : rows * patch, : columns * patch]
    x = pixels.reshape(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, rows * columns, channels * patch * patch)
