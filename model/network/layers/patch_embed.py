"""Patch embeddings, which turn pixels into tokens."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.layer_config import ConvolutionalStem
from model.network.layers.attention import norm_or_none
from model.network.layers.block import ACTIVATIONS
from model.network.layers.resnet import ResNetV2


class PatchEmbed(nn.Module):
    """Non-overlapping patches, each through the same linear map.

    This is a convolution with stride = kernel. A stem's last feature map replaces the pixels.

    Attributes:
        as_product: compute the convolution as one matrix product over flattened patches.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        channels = config.in_channels
        patch = config.patch_size
        self.as_product = False
        self.backbone: nn.Module | None = None
        if config.stem is not None:
            self.backbone = ResNetV2(config.stem, config.in_channels)
            channels = config.stem.channels
            patch //= config.stem.stride
        if config.conv_stem is not None:
            self.backbone = ConvStem(config.conv_stem, config.in_channels)
            channels = config.conv_stem.widths[-1]
            patch //= config.conv_stem.stride
        self.proj = nn.Conv2d(
            channels, config.width, kernel_size=patch, stride=patch, bias=config.patch_bias
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, gh*gw, D], row by row."""
        if self.backbone is not None:
            pixels = self.backbone(pixels)
        if self.as_product:
            weight = self.proj.weight
            patches = _flat_patches(pixels, weight.shape[-1])
            return F.linear(patches, weight.flatten(1), self.proj.bias)
        x: Tensor = self.proj(pixels)
        return x.flatten(2).transpose(1, 2)


class ConvStem(nn.ModuleList):
    """Convolutions, each followed by an activation; see `ConvolutionalStem`."""

    def __init__(self, config: ConvolutionalStem, in_channels: int) -> None:
        inputs = (in_channels, *config.widths)
        super().__init__(
            nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2)
            for channels, width, kernel, stride in zip(
                inputs, config.widths, config.kernels, config.strides, strict=False
            )
        )
        self.pools = config.pools or (1,) * len(config.widths)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, widths[-1], H / stride, W / stride]."""
        for convolution, pool in zip(self, self.pools, strict=True):
            assert isinstance(convolution, nn.Conv2d)
            if pool > 1:
                # Add biases last: OpenVINO 2026.4 would move an activation before the maximum,
                # which is wrong for activations that are not monotonic.
                x = F.conv2d(x, convolution.weight, None, convolution.stride, convolution.padding)
                x = F.max_pool2d(x, pool) + cast(Tensor, convolution.bias)[:, None, None]
            else:
                x = convolution(x)
            x = self.activation(x)
        return x


class LinearPatchEmbed(nn.Module):
    """A patch embedding as one matrix product over flattened patches.

    A patch is flattened by channels, then rows, then columns.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.patch_size = config.patch_size
        inputs = config.in_channels * config.patch_size**2
        self.norm_in = norm_or_none(inputs, config.norm_eps, present=config.patch_norms)
        self.proj = nn.Linear(inputs, config.width, bias=config.patch_bias)
        self.norm_out = norm_or_none(config.width, config.norm_eps, present=config.patch_norms)

    def forward(self, pixels: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, gh*gw, D], row by row."""
        x: Tensor = self.norm_out(self.proj(self.norm_in(_flat_patches(pixels, self.patch_size))))
        return x


def _flat_patches(pixels: Tensor, patch: int) -> Tensor:
    """Map [B, C, H, W] to [B, gh*gw, C*patch*patch], without partial patches at the edges."""
    batch, channels, height, width = pixels.shape
    rows = height // patch
    columns = width // patch
    pixels = pixels[:, :, : rows * patch, : columns * patch]
    x = pixels.reshape(batch, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, rows * columns, channels * patch * patch)
