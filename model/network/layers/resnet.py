"""The ResNetV2 of the hybrid ViT: weight-standardised convolutions and group norm.

Its bottlenecks have the activation after the sum. Kolesnikov et al. 2019 (BiT,
https://arxiv.org/abs/1912.11370); parameter names are timm's (`timm/models/resnetv2.py`,
`preact=False`).
"""

import math
from collections import OrderedDict

import torch.nn.functional as F
from torch import Tensor, nn

from model.layer_config import ResNetStem

_GROUPS = 32


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad [B, C, H, W] like TensorFlow's SAME, so that the output is ceil(size / stride).

    An odd pixel goes below and to the right.
    """
    height, width = x.shape[-2:]
    rows = max((math.ceil(height / stride) - 1) * stride + kernel - height, 0)
    columns = max((math.ceil(width / stride) - 1) * stride + kernel - width, 0)
    return F.pad(
        x, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2), value=value
    )


class StandardizedConv2d(nn.Conv2d):
    """A convolution whose filters are scaled to mean 0 and variance 1 (Qiao et al. 2019)."""

    def __init__(self, channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> None:
        # With stride 1, torch's own padding equals TensorFlow's.
        padding = 0 if stride > 1 else (kernel - 1) // 2
        super().__init__(channels, out_channels, kernel, stride=stride, padding=padding, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Map [B, C, H, W] to [B, out, ceil(H / stride), ceil(W / stride)]."""
        if self.stride[0] > 1:
            input = pad_same(input, self.kernel_size[0], self.stride[0])  # noqa: A001
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0, eps=1e-8)
        return F.conv2d(input, weight.reshape_as(self.weight), None, self.stride, self.padding)


class Root(nn.Module):
    """7x7 convolution and 3x3 max pooling, each with stride 2."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.conv = StandardizedConv2d(in_channels, 64, 7, stride=2)
        self.norm = nn.GroupNorm(_GROUPS, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, 64, H/4, W/4]."""
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(pad_same(x, 3, 2, value=-math.inf), 3, stride=2)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the activation follows the sum."""

    def __init__(self, channels: int, out_channels: int, stride: int, *, first: bool) -> None:
        super().__init__()
        middle = out_channels // 4
        self.downsample: nn.Module | None = None
        if first:
            shortcut = StandardizedConv2d(channels, out_channels, 1, stride=stride)
            self.downsample = nn.Sequential(
                OrderedDict(conv=shortcut, norm=nn.GroupNorm(_GROUPS, out_channels))
            )
        self.conv1 = StandardizedConv2d(channels, middle, 1)
        self.norm1 = nn.GroupNorm(_GROUPS, middle)
        self.conv2 = StandardizedConv2d(middle, middle, 3, stride=stride)
        self.norm2 = nn.GroupNorm(_GROUPS, middle)
        self.conv3 = StandardizedConv2d(middle, out_channels, 1)
        self.norm3 = nn.GroupNorm(_GROUPS, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, H, W] to [B, out, H/stride, W/stride]."""
        shortcut = x if self.downsample is None else self.downsample(x)
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + shortcut)


class ResNetV2(nn.Sequential):
    """Maps pixels [B, C, H, W] to a feature map.

    The map is [B, config.channels, H / config.stride, W / config.stride].
    """

    def __init__(self, config: ResNetStem, in_channels: int) -> None:
        channels = [64, *(256 * 2**i for i in range(len(config.layers)))]
        stages = []
        for i, depth in enumerate(config.layers):
            width = channels[i + 1]
            stride = 1 if i == 0 else 2
            blocks = [Bottleneck(channels[i], width, stride, first=True)]
            blocks += [Bottleneck(width, width, 1, first=False) for _ in range(1, depth)]
            stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks))))
        super().__init__(OrderedDict(stem=Root(in_channels), stages=nn.Sequential(*stages)))
