"""Parts of an architecture: the stem before the patches, and rotary positions."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

# (rows, columns) in pixels or patches.
Size = tuple[Annotated[int, Field(ge=1, le=16384)], Annotated[int, Field(ge=1, le=16384)]]

Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"]


class Frozen(BaseModel):
    """A table of values that never changes and refuses fields that it does not name."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ResNetStem(Frozen):
    """The stem of the ViT paper's hybrid: a ResNetV2 before the Transformer instead of raw patches.

    Standardised convolutions and group normalisation (Kolesnikov et al. 2019, BiT); each stage
    after the first halves the resolution, and the root halves it twice.
    """

    # Bottleneck blocks of each stage; without stages, only the root is left.
    layers: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(max_length=4)]
    # TensorFlow's padding, which is asymmetric if the stride does not divide the size.
    same_padding: Literal[True] = True

    @property
    def channels(self) -> int:
        """Return the number of channels of the output."""
        return 64 if not self.layers else 256 * 2 ** (len(self.layers) - 1)

    @property
    def stride(self) -> int:
        """Return the number of input pixels along each axis for one output pixel."""
        return 4 if not self.layers else 4 * 2 ** (len(self.layers) - 1)


class ConvolutionalStem(Frozen):
    """Convolutions before the patches' own, an activation after each (Xiao et al. 2021).

    See https://arxiv.org/abs/2106.14881. Each is padded by half of its kernel; batch norms are
    folded into them.
    """

    widths: Annotated[
        tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=8)
    ]
    kernels: tuple[Annotated[int, Field(ge=1, le=15)], ...]
    strides: tuple[Annotated[int, Field(ge=1, le=8)], ...]
    # Edge of the max pooling between each convolution and its activation; empty means 1 for each.
    pools: tuple[Annotated[int, Field(ge=1, le=8)], ...] = ()
    activation: Activation = "relu"

    @property
    def stride(self) -> int:
        """Return the number of input pixels along each axis for one output pixel."""
        return math.prod(self.strides) * math.prod(self.pools)

    def largest_layer(self, size: Size) -> int:
        """Return the numbers in the largest feature map of an image of this size, before pooling.

        Raises:
            ValueError: widths, kernels, strides and pools differ in length.
        """
        pools = self.pools or (1,) * len(self.widths)
        if not len(self.widths) == len(self.kernels) == len(self.strides) == len(pools):
            raise ValueError(
                "widths, kernels, strides and pools need one number for each convolution"
            )
        rows, columns = size
        largest = 0
        for width, kernel, stride, pool in zip(
            self.widths, self.kernels, self.strides, pools, strict=True
        ):
            border = 2 * (kernel // 2) - kernel
            rows = (rows + border) // stride + 1
            columns = (columns + border) // stride + 1
            largest = max(largest, rows * columns * width)
            rows //= pool
            columns //= pool
        return largest


class RotaryPositions(Frozen):
    """Queries and keys are rotated by angles: positions times frequencies.

    See `model.network.layers.rotary`.
    """

    # Each attention head of each block has its own frequencies, mixed of both axes; else
    # frequencies fall geometrically.
    learned: bool = False
    # Ratio of the first frequency to the last, if they are not learned.
    temperature: Annotated[float, Field(gt=1, le=1e9)] = 10_000.0
    # Positions are -2 pi to 2 pi along each axis whatever the grid is (DINOv3); else they count
    # patches.
    centred: bool = False
    # Position of the first counted patch.
    offset: Annotated[float, Field(ge=-16, le=16)] = 0.0
    # (rows, columns) that counted positions are scaled to: the grid of pre-training (EVA-02).
    reference_grid: Size | None = None
