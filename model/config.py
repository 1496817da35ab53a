"""A model's architecture and its preprocessing, as its checkpoint states them.

Both configs travel with the weights, frozen and validated. Mean, std, size and interpolation have
no defaults, because a default could silently replace a missing statistic.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from model.layer_config import (
    Activation,
    ConvolutionalStem,
    Frozen,
    ResNetStem,
    RotaryPositions,
    Size,
)
from model.library_arguments import check_arguments

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Pool = Literal["cls", "mean", "max", "mean_max", "cls_mean", "attention", "transfer"]
AttentionSource = Literal["cls", "patch_mean", "pool_query"]
CropShare = Annotated[float, Field(ge=0.01, le=1)]
Mean = Annotated[float, Field(ge=-1e3, le=1e3)]
# Standard deviation of pixels of 0...1. A smaller divisor would make pixels overflow in the
# network.
Deviation = Annotated[float, Field(ge=1e-4, le=1e3)]

_MAX_TOKENS: Final = 65536
# Most numbers in the output of a layer for one image: 512 MiB. ViT-H/16 gives 84 million at 2048
# px.
LARGEST_LAYER: Final = 1 << 27


class NetworkConfig(Frozen):
    """The fields that every network has, ours or a library's.

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range; or fields disagree.
    """

    # (rows, columns) of the input in pixels.
    image_size: Size
    # 0: no classification head. The network gives embeddings, and a ViT also attention maps.
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    in_channels: Annotated[int, Field(ge=1, le=4)] = 3
    # Dimension of a Transformer's tokens, or of the features that another network's head reads.
    width: Annotated[int, Field(ge=1, le=16384)]

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> "NetworkConfig":
        """Validate fields of any network as the subclass that they describe.

        Only fields of a library's network name a library.
        """
        if cls is NetworkConfig and isinstance(fields, dict):
            return (LibraryConfig if "library" in fields else ViTConfig).model_validate(fields)
        return handler(fields)

    @property
    def logits(self) -> int:
        """Return the number of logits; without a head it is one, which no answer shows."""
        return max(self.num_classes, 1)

    @property
    def kind(self) -> str:
        """Return the name of a network of this configuration in messages."""
        return "a Vision Transformer"


class LibraryConfig(NetworkConfig):
    """A network that a library's own module computes, by the library's name of its architecture.

    Only arguments that size a network are allowed; see `model.library_arguments`.
    """

    # The package with the network's code.
    library: Literal["timm"]
    # Without a tag; never a name that the library would look up on a disk or a hub.
    architecture: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_]{1,100}$")]
    # Arguments of the architecture, besides classes, channels and input size.
    arguments: dict[str, Any]
    # Whether the input size is an argument of the architecture.
    fixed_size: bool

    @property
    def kind(self) -> str:
        """Return the name of a network of this configuration in messages."""
        return f"{self.library}'s {self.architecture}"

    @field_validator("arguments")
    @classmethod
    def _allowed(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        check_arguments(arguments)
        return arguments


class ViTConfig(NetworkConfig):
    """Architecture of a Vision Transformer (Dosovitskiy et al. 2020).

    See https://arxiv.org/abs/2010.11929. Each side of `image_size` is a multiple of `patch_size`
    unless `drop_remainder`.
    """

    # Input pixels along a patch's edge; with a stem, the stem's stride times its own patches' edge.
    patch_size: Annotated[int, Field(ge=1, le=1024)]
    depth: Annotated[int, Field(ge=1, le=256)]
    heads: Annotated[int, Field(ge=1, le=256)]
    # Hidden dimension of the MLP, 4 x width in the paper; with SwiGLU the dimension after gating.
    mlp_width: Annotated[int, Field(ge=1, le=131072)]
    # Drop the rows and columns at the bottom and right that do not fill a patch (SigLIP, 384 px
    # by 14).
    drop_remainder: bool = False

    stem: ResNetStem | None = None
    conv_stem: ConvolutionalStem | None = None
    # How patches become tokens; both compute the same map.
    patch_embedding: Literal["convolution", "linear"] = "convolution"
    patch_bias: bool = True
    # A LayerNorm over each flattened patch and one over its token (vit-pytorch); needs 'linear'.
    patch_norms: bool = False
    # sincos2d is fixed (Beyer et al. 2022, https://arxiv.org/abs/2205.01580).
    position_embedding: Literal["learned", "sincos2d", "none"] = "learned"
    # The position embedding has entries for the prefix tokens too (timm: not `no_embed_class`).
    position_prefix: bool = True
    # Each block adds a learned bias per attention head and offset to its attention scores (BEiT).
    relative_position_bias: bool = False
    rotary: RotaryPositions | None = None

    class_token: bool = True
    # A second token after CLS (Touvron et al. 2020, DeiT).
    distillation_token: bool = False
    # Tokens that belong neither to a patch nor to a class (Darcet et al. 2023).
    registers: Annotated[int, Field(ge=0, le=1024)] = 0

    # A LayerNorm between the embedding and the first block (CLIP).
    norm_before_blocks: bool = False
    # Position of the blocks' norms: pre, at the start of each branch; post, after each sum (Vaswani
    # et al. 2017); res_post, at the end of each branch (Liu et al. 2022, Swin V2).
    norm_order: Literal["pre", "post", "res_post"] = "pre"
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    # Dimension of queries, keys and values over all attention heads; None is `width`.
    attention_width: Annotated[int, Field(ge=1, le=16384)] | None = None
    qkv_bias: bool = True
    # The attention's output projection and the MLP have biases.
    projection_bias: bool = True
    # Each attention head has a LayerNorm over queries and keys (Dehghani et al. 2023).
    qk_norm: bool = False
    # A LayerNorm between the attention heads' values and their output projection (EVA-02's CLIP
    # models, BEiT-3).
    attention_norm: bool = False
    # swiglu: act(gate) * value (Shazeer 2020), gate and value in one projection, gate first.
    mlp: Literal["plain", "swiglu"] = "plain"
    # A LayerNorm between the activation, or the gated values, and the second projection (EVA-02,
    # BEiT-3).
    mlp_norm: bool = False
    activation: Activation = "gelu"
    # Both residual branches have a learned factor for each channel (Touvron et al. 2021, CaiT).
    layer_scale: bool = False

    # mean_max is half their sum; cls_mean is the concatenation [CLS, mean] (DINOv2's linear head).
    # transfer is the concatenation of the transfer features: see `model.network.transfer`.
    pool: Pool = "cls"
    # Mean, max and attention pooling include the prefix tokens.
    pool_prefix: bool = False
    # Number of the attention pooling's heads; None is `heads`.
    pool_heads: Annotated[int, Field(ge=1, le=256)] | None = None
    # Hidden dimension of the attention pooling's MLP; None is `mlp_width`.
    pool_mlp_width: Annotated[int, Field(ge=1, le=131072)] | None = None
    final_norm: bool = True
    # The final LayerNorm comes after the pooling (timm's `fc_norm`) instead of before it.
    norm_after_pool: bool = False
    # Width of a projection of the pooled features, without a bias, which the head reads (CLIP).
    projection_width: Annotated[int, Field(ge=1, le=16384)] | None = None
    # The head divides its input by its L2 norm; its rows are features of texts times a scale (CLIP,
    # SigLIP).
    normalized_head: bool = False
    # Fields of folders from versions in which heads could have two layers.
    head_width: None = None
    head_activation: Activation = "tanh"
    # The distillation token has its own linear head; the logits of both are averaged.
    distillation_head: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        problem = next(self._problems(), None)
        if problem is not None:
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield a message for each group of fields that disagree or are absurd together."""
        yield from self._problems_of_patches()
        yield from self._problems_of_blocks()
        yield from self._problems_of_head()

    def _problems_of_patches(self) -> Iterator[str]:
        rows, columns = self.image_size
        patch = self.patch_size
        has_remainder = bool(rows % patch or columns % patch)
        if has_remainder and not self.drop_remainder:
            yield f"image_size {rows}x{columns} is not a multiple of patch_size {patch}"
        if rows < patch or columns < patch:
            yield f"image_size {rows}x{columns} is smaller than patch_size {patch}"
        stem = self.conv_stem or self.stem
        if stem is not None and patch % stem.stride != 0:
            yield f"patch_size {patch} is not a multiple of the stem's stride {stem.stride}"
        if stem is not None and self.patch_embedding != "convolution":
            yield "a stem needs patch_embedding 'convolution'"
        if self.stem is not None and self.conv_stem is not None:
            yield "stem and conv_stem exclude each other"
        if self.patch_norms and self.patch_embedding != "linear":
            yield "patch_norms needs patch_embedding 'linear'"

    def _problems_of_blocks(self) -> Iterator[str]:
        width = self.inner_width
        head_width = width // self.heads
        if width % self.heads != 0:
            yield f"width {width} is not a multiple of heads {self.heads}"
        if self.rotary is not None and head_width % 4 != 0:
            yield f"rotary needs a width of the heads that is a multiple of 4, not {head_width}"
        if self.position_embedding == "sincos2d" and self.width % 4 != 0:
            yield (
                "position_embedding 'sincos2d' needs a width that is a multiple of 4, "
                f"not {self.width}"
            )
        if self.tokens > _MAX_TOKENS:
            yield f"{self.tokens} tokens; at most {_MAX_TOKENS} are allowed"
        if self.largest_layer > LARGEST_LAYER:
            yield (
                f"{self.largest_layer:,} numbers in a layer: at most {LARGEST_LAYER:,} are allowed"
            )
        if self.distillation_token and (not self.class_token or self.registers > 0):
            yield "distillation_token needs class_token and no registers"
        if self.relative_position_bias and self.prefix_tokens > self.class_token:
            yield "relative_position_bias allows no prefix token but class_token"

    def _problems_of_head(self) -> Iterator[str]:
        pool_heads = self.pool_heads or self.heads
        if self.pool == "attention" and self.width % pool_heads != 0:
            yield f"width {self.width} is not a multiple of pool_heads {pool_heads}"
        if self.pool in ("cls", "cls_mean") and not self.class_token:
            yield f"pool {self.pool!r} needs class_token"
        if self.distillation_head and not self._allows_distillation_head:
            yield (
                "distillation_head needs distillation_token, pool 'cls' and the norm before the "
                "pooling"
            )
        compares_texts = self.normalized_head or self.projection_width is not None
        if compares_texts and self.distillation_head:
            yield "projection_width and normalized_head need only one head"
        if self.pool == "transfer" and self.projection_width is not None:
            yield "pool 'transfer' allows no projection_width"
        if self.norm_after_pool and (not self.final_norm or self.pool == "cls_mean"):
            yield "norm_after_pool needs final_norm and a pool other than 'cls_mean'"
        if self.pool == "attention" and (self.mlp != "plain" or self.mlp_norm):
            yield "pool 'attention' needs mlp 'plain' without mlp_norm"

    @property
    def _allows_distillation_head(self) -> bool:
        return self.distillation_token and self.pool == "cls" and not self.norm_after_pool

    @property
    def grid(self) -> tuple[int, int]:
        """Return (rows, columns) of patches."""
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        """Return the number of tokens before the patches, which an attention map leaves out."""
        return int(self.class_token) + int(self.distillation_token) + self.registers

    @property
    def tokens(self) -> int:
        """Return the sequence length N: the prefix tokens and the patches."""
        return self.prefix_tokens + math.prod(self.grid)

    @property
    def largest_layer(self) -> int:
        """Return the number of values in the largest output of a layer for one image."""
        pixels = math.prod(self.image_size)
        hidden = self.mlp_width * (2 if self.mlp == "swiglu" else 1)
        layers = [
            pixels * self.in_channels,
            self.tokens * max(hidden, 3 * self.inner_width, self.width),
        ]
        if self.relative_position_bias:  # added to all scores of the attention
            layers.append(self.heads * self.tokens**2)
        if self.stem is not None:  # 64 channels at half of the resolution, and 256 at a quarter
            layers.append(16 * pixels)
        if self.conv_stem is not None:
            layers.append(self.conv_stem.largest_layer(self.image_size))
        return max(layers)

    @property
    def position_tokens(self) -> int:
        """Return the number of entries of the position embedding."""
        return self.tokens if self.position_prefix else math.prod(self.grid)

    @property
    def inner_width(self) -> int:
        """Return the dimension of queries, keys and values over all attention heads."""
        return self.attention_width or self.width

    @property
    def attention_source(self) -> AttentionSource:
        """Return the query whose attention a map of the last layer shows.

        * `cls`: the head reads the CLS token.
        * `pool_query`: the pooling is by attention, with as many attention heads as the blocks.
        * `patch_mean`: the mean over all patch queries, for all other networks.
        """
        if self.pool in ("cls", "cls_mean") or (self.pool == "transfer" and self.class_token):
            return "cls"
        if self.pool == "attention" and self.pool_heads in (None, self.heads):
            return "pool_query"
        return "patch_mean"


def cropped_from(size: Size, crop_pct: float) -> tuple[int, int]:
    """Return the (rows, columns) that a picture is resized to before a crop, rounded as in timm.

    Args:
        size: (rows, columns) of the crop.
        crop_pct: share of the resized picture that the crop keeps.
    """
    return math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)


class PreprocessConfig(Frozen):
    """Preprocessing of an upright RGB picture of any size into the model's input.

    The picture is resized to `resize_size`, and its centre of `size` is cut out:

    * `shortest_edge`: aspect kept, the picture just covers `resize_size` (torchvision's
      `Resize(int)`).
    * `squash`: aspect given up, exactly `resize_size` (Hugging Face's ViT, timm's
      `crop_mode=squash`).

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range; or fields disagree.
    """

    # (rows, columns) of the model's input in pixels.
    size: Size
    resize: Literal["shortest_edge", "squash"]
    # (rows, columns) before the centre crop; each at least `size`.
    resize_size: Size
    # Share of the resized picture that the crop keeps, as timm states it: `resize_size` is
    # floor(size / crop_pct), here and at every other size. None if only the sizes are stated.
    crop_pct: CropShare | None = None
    interpolation: Interpolation
    # How the start of the crop is rounded if the margin is odd: as in torchvision or as in
    # transformers.
    crop_rounding: Literal["half_even", "down"] = "half_even"
    # Mean of each channel, of pixels scaled to 0...1.
    mean: Annotated[tuple[Mean, ...], Field(min_length=1, max_length=4)]
    std: Annotated[tuple[Deviation, ...], Field(min_length=1, max_length=4)]

    @model_validator(mode="before")
    @classmethod
    def _with_resize_size(cls, fields: Any) -> Any:
        """Add the `resize_size` that `crop_pct` implies, unless the fields state it."""
        if not isinstance(fields, dict) or "resize_size" in fields:
            return fields
        if fields.get("crop_pct") is None:
            return fields
        try:
            share = TypeAdapter(CropShare).validate_python(fields["crop_pct"])
            size = TypeAdapter(Size).validate_python(fields.get("size"))
        except ValidationError:  # the fields themselves raise it again, with their names
            return fields | {"resize_size": (1, 1)}
        return fields | {"resize_size": cropped_from(size, share)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.crop_pct is not None:
            implied = cropped_from(self.size, self.crop_pct)
            if self.resize_size != implied:
                raise ValueError(
                    f"resize_size {self.resize_size} is not floor(size / crop_pct), {implied}"
                )
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
        if self.resize_size[0] < self.size[0] or self.resize_size[1] < self.size[1]:
            raise ValueError(f"resize_size {self.resize_size} is smaller than size {self.size}")
        return self
