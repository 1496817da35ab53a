"""What a checkpoint says of itself: architecture and preprocessing, frozen and validated.

Both configs travel with the weights; nothing here has a default that could silently stand in for a
missing statistic (mean, std, size, interpolation have none).
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Size = tuple[Annotated[int, Field(ge=1, le=16384)], Annotated[int, Field(ge=1, le=16384)]]
"""(rows, columns) in pixels or patches."""

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Pool = Literal["cls", "mean"]
Activation = Literal["gelu", "gelu_tanh", "relu"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ViTConfig(_Frozen):
    """Architecture of a Vision Transformer (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929).

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range; or fields disagree.
    """

    image_size: Size
    """(rows, columns) of the input in pixels; each a multiple of `patch_size`."""
    patch_size: Annotated[int, Field(ge=1, le=1024)]
    width: Annotated[int, Field(ge=1, le=16384)]
    """Token dimension D."""
    depth: Annotated[int, Field(ge=1, le=256)]
    heads: Annotated[int, Field(ge=1, le=256)]
    mlp_width: Annotated[int, Field(ge=1, le=131072)]
    """Hidden dimension of the MLP; 4 x width in the paper."""
    num_classes: Annotated[int, Field(ge=1, le=1_000_000)]
    in_channels: Annotated[int, Field(ge=1, le=4)] = 3
    pool: Pool = "cls"
    class_token: bool = True
    norm_after_pool: bool = False
    """The final LayerNorm stands after the mean pooling (timm's `fc_norm`) instead of before it."""
    qkv_bias: bool = True
    activation: Activation = "gelu"
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        rows, columns = self.image_size
        if rows % self.patch_size or columns % self.patch_size:
            raise ValueError(f"image_size {rows}x{columns} is not a multiple of patch_size {self.patch_size}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.pool == "cls" and not self.class_token:
            raise ValueError("pool 'cls' needs class_token")
        if self.norm_after_pool and self.pool == "cls":
            raise ValueError("norm_after_pool needs pool 'mean'")
        return self

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: those an attention map has no place for."""
        return int(self.class_token)

    @property
    def tokens(self) -> int:
        """Sequence length N: prefix tokens and patches."""
        return self.prefix_tokens + math.prod(self.grid)

    @property
    def attention_source(self) -> Literal["cls", "patch_mean"]:
        """Whose attention a map shows: the CLS query's, or the mean over all patch queries."""
        return "cls" if self.pool == "cls" else "patch_mean"


class PreprocessConfig(_Frozen):
    """From an upright RGB picture of any size to the model's input.

    The picture is resized to `resize_size` and its centre of `size` is cut out:

    * `shortest_edge`: aspect kept, the picture just covers `resize_size` (torchvision `Resize(int)`).
    * `squash`: aspect given up, exactly `resize_size` (Hugging Face's ViT, timm's `crop_mode=squash`).

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range; or fields disagree.
    """

    size: Size
    """(rows, columns) of the model's input in pixels."""
    resize: Literal["shortest_edge", "squash"]
    resize_size: Size
    """(rows, columns) before the centre crop; each at least `size`."""
    interpolation: Interpolation
    mean: Annotated[tuple[Finite, ...], Field(min_length=1, max_length=4)]
    """Per channel, of pixels scaled to 0...1."""
    std: Annotated[tuple[Annotated[Finite, Field(gt=0)], ...], Field(min_length=1, max_length=4)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
        if self.resize_size[0] < self.size[0] or self.resize_size[1] < self.size[1]:
            raise ValueError(f"resize_size {self.resize_size} is smaller than size {self.size}")
        return self


SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "mlp_width": 768},
    "small": {"width": 384, "depth": 12, "heads": 6, "mlp_width": 1536},
    "base": {"width": 768, "depth": 12, "heads": 12, "mlp_width": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "mlp_width": 4096},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "mlp_width": 5120},
}
"""Tiny (Touvron et al. 2020), Small, Base, Large and Huge (Dosovitskiy et al. 2020, table 1)."""
