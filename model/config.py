"""A model's architecture and its preprocessing, as its checkpoint states them: frozen and
validated.

Both configs travel with the weights. Mean, std, size and interpolation have no defaults, which
could silently stand in for a missing statistic.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

# (rows, columns) in pixels or patches.
Size = tuple[Annotated[int, Field(ge=1, le=16384)], Annotated[int, Field(ge=1, le=16384)]]

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
Pool = Literal["cls", "mean", "max", "mean_max", "cls_mean", "attention"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"]
AttentionSource = Literal["cls", "patch_mean", "pool_query"]
CropShare = Annotated[float, Field(ge=0.01, le=1)]
Mean = Annotated[float, Field(ge=-1e3, le=1e3)]
# Standard deviation of pixels of 0...1. Divided by less, pixels would overflow in the network.
Deviation = Annotated[float, Field(ge=1e-3, le=1e3)]

_MAX_TOKENS = 65536
# Numbers that one layer may give for one image: 512 MiB. ViT-H/16 gives 84 million at 2048 px.
LARGEST_LAYER = 1 << 27
_MAX_NUMBER = 16384

_CHOICES = re.compile("(act|aa|norm)_layer|global_pool|pad_type|pos_embed|stem_type|weight_init")
# What an architecture may be made with: the number of layers, choices by name, and sizes.
_ARGUMENTS = re.compile(
    f"{_CHOICES.pattern}|depths?|depth_token_only|layers|cls_attn_layers|num_blocks|reg_tokens"
    "|((attn|head|patch|path|pos|proj)_)?drop_rate|drop_(block|path)_rate"
    "|channels|class_token|conv_mlp|dims?|distilled|down_kernel_size|dynamic_img_size|embed_dims?|expand_ratio|fc_norm"
    "|final_norm|fix_init|growth_rate|head_dim|head_hidden_size|head_init_scale|head_norm_first|img_size|kernel_sizes?"
    "|(ls_init|layer_scale_init)_value|init_values|mlp_ratios?|no_embed_class|norm_eps|num_features|num_heads|patch_size"
    "|pre_norm|qk_norm|qkv_bias|stem_size|stem_width|strict_img_size|use_(abs_pos_emb|fc_norm|rel_pos_bias)"
    "|window_size|zero_init_last"
)


class Frozen(BaseModel):
    """A table of values that never changes and has no other fields than those that it names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ResNetStem(Frozen):
    """The stem of the ViT paper's hybrid: a ResNetV2 before the Transformer instead of raw patches.

    Standardised convolutions and group normalisation (Kolesnikov et al. 2019, BiT); each stage
    after the first halves the resolution, and the root halves it twice.
    """

    # Bottleneck blocks of each stage; none at all is the root alone.
    layers: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(max_length=4)]
    # TensorFlow's padding, which is asymmetric where the stride does not divide the size.
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
    """Convolutions before the patches' own, an activation after each (Xiao et al. 2021, arXiv
    2106.14881).

    Each is padded by half of its kernel; batch norms are folded into them.
    """

    widths: Annotated[
        tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=8)
    ]
    kernels: tuple[Annotated[int, Field(ge=1, le=15)], ...]
    strides: tuple[Annotated[int, Field(ge=1, le=8)], ...]
    # Edge of the squares whose maximum each convolution hands to its activation; none at all is 1
    # for each.
    pools: tuple[Annotated[int, Field(ge=1, le=8)], ...] = ()
    activation: Activation = "relu"

    @property
    def stride(self) -> int:
        """Return the number of input pixels along each axis for one output pixel."""
        return math.prod(self.strides) * math.prod(self.pools)

    def largest_layer(self, size: Size) -> int:
        """Return the numbers of the largest feature map, before its maxima, for one image of a
        size.

        Raises:
            ValueError: there is not one width, kernel, stride and pool for each convolution.
        """
        rows, columns = size
        largest = 0
        if (
            not len(self.widths)
            == len(self.kernels)
            == len(self.strides)
            == len(self.pools or self.widths)
        ):
            raise ValueError(
                "widths, kernels, strides and pools need one number for each convolution"
            )
        pools = self.pools or (1,) * len(self.widths)
        for width, kernel, stride, pool in zip(
            self.widths, self.kernels, self.strides, pools, strict=True
        ):
            rows, columns = (
                (side + 2 * (kernel // 2) - kernel) // stride + 1 for side in (rows, columns)
            )
            largest = max(largest, rows * columns * width)
            rows, columns = rows // pool, columns // pool
        return largest


class RotaryPositions(Frozen):
    """Queries and keys are turned by angles that are places times frequencies; see
    `model.network.layers.rotary`.
    """

    # Each head of each block has frequencies of its own, mixed of both axes; else they fall
    # geometrically.
    learned: bool = False
    # What the frequencies fall to a fraction of, where they are not learned.
    temperature: Annotated[float, Field(gt=1, le=1e9)] = 10_000.0
    # Places are -2 pi to 2 pi along each axis whatever the grid is (DINOv3); else they count
    # patches.
    centred: bool = False
    # Place of the first patch that is counted.
    offset: Annotated[float, Field(ge=-16, le=16)] = 0.0
    # (rows, columns) that counted places are scaled to, those of pre-training (EVA-02).
    reference_grid: Size | None = None


class NetworkConfig(Frozen):
    """What every network has, whoever wrote its layers.

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range; or fields disagree.
    """

    # (rows, columns) of the input in pixels.
    image_size: Size
    # 0 is a network without a classification head: it gives embeddings, and a ViT maps of its
    # attention.
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    in_channels: Annotated[int, Field(ge=1, le=4)] = 3
    # Dimension of a Transformer's tokens, or of what another network's head reads.
    width: Annotated[int, Field(ge=1, le=16384)]

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_kind(cls, fields: Any, handler: ModelWrapValidatorHandler[Self]) -> "NetworkConfig":
        """Return what fields describe that may be of any network: only a library's say so."""
        if cls is NetworkConfig and isinstance(fields, dict):
            return (LibraryConfig if "library" in fields else ViTConfig).model_validate(fields)
        return handler(fields)

    @property
    def logits(self) -> int:
        """Return how many logits the network computes: one without a head, which no answer shows."""
        return max(self.num_classes, 1)

    @property
    def kind(self) -> str:
        """Return the name of a network of this configuration in messages."""
        return "a Vision Transformer"


class LibraryConfig(NetworkConfig):
    """A network that a library's own module computes, by the library's name of its architecture.

    Only arguments that size a network are allowed: none that reads a file, imports code or changes
    what a pass returns.
    """

    # The package whose code the network is.
    library: Literal["timm"]
    # Without a tag; no name that the library would look up on a disk or a hub.
    architecture: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_]{1,100}$")]
    # What the architecture is made with, beside classes, channels and input size.
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
        for name, value in arguments.items():
            if not _ARGUMENTS.fullmatch(name):
                raise ValueError(
                    f"argument {name!r:.100} is none of those that size a network: it is not passed on"
                )
            if (
                _CHOICES.fullmatch(name)
                and isinstance(value, str)
                and re.fullmatch("[a-z0-9_]{0,40}", value)
            ):
                continue
            values = value if isinstance(value, list | tuple) else [value]
            numbers = [
                number
                for each in values
                for number in (each if isinstance(each, list | tuple) else [each])
            ]
            if not all(
                isinstance(number, int | float) and abs(number) <= _MAX_NUMBER for number in numbers
            ):
                raise ValueError(
                    f"argument {name} {value!r:.100}: expected numbers up to {_MAX_NUMBER}"
                )
        return arguments


class ViTConfig(NetworkConfig):
    """Architecture of a Vision Transformer (Dosovitskiy et al. 2020,
    https://arxiv.org/abs/2010.11929).

    Each side of `image_size` is a multiple of `patch_size` unless `drop_remainder`.
    """

    # Input pixels along a patch's edge; with a stem, the stem's stride times its own patches' edge.
    patch_size: Annotated[int, Field(ge=1, le=1024)]
    depth: Annotated[int, Field(ge=1, le=256)]
    heads: Annotated[int, Field(ge=1, le=256)]
    # Hidden dimension of the MLP, 4 x width in the paper; with SwiGLU the dimension after gating.
    mlp_width: Annotated[int, Field(ge=1, le=131072)]
    # Rows and columns at the bottom and right that fill no patch are dropped (SigLIP, 384 px by
    # 14).
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
    # Each block adds a learned bias for each head and offset to its attention scores (BEiT).
    relative_position_bias: bool = False
    rotary: RotaryPositions | None = None

    class_token: bool = True
    # A second token after CLS (Touvron et al. 2020, DeiT).
    distillation_token: bool = False
    # Tokens that belong to no patch and no class (Darcet et al. 2023).
    registers: Annotated[int, Field(ge=0, le=1024)] = 0

    # A LayerNorm stands between the embedding and the first block (CLIP).
    norm_before_blocks: bool = False
    # Where the blocks' norms are: pre, on each branch's way in; post, after each sum (Vaswani et
    # al. 2017); res_post, on each branch's way out (Liu et al. 2022, Swin V2).
    norm_order: Literal["pre", "post", "res_post"] = "pre"
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    # Dimension of queries, keys and values over all heads; None is `width`.
    attention_width: Annotated[int, Field(ge=1, le=16384)] | None = None
    qkv_bias: bool = True
    # The attention's output projection and the MLP have biases.
    projection_bias: bool = True
    # Each head has a LayerNorm over queries and keys (Dehghani et al. 2023).
    qk_norm: bool = False
    # A LayerNorm stands between the heads' values and their output projection (EVA-02's CLIP
    # models, BEiT-3).
    attention_norm: bool = False
    # swiglu: act(gate) * value (Shazeer 2020), gate and value in one projection, gate first.
    mlp: Literal["plain", "swiglu"] = "plain"
    # A LayerNorm stands between the activation, or the gated values, and the second projection
    # (EVA-02, BEiT-3).
    mlp_norm: bool = False
    activation: Activation = "gelu"
    # Both residual branches have a learned factor for each channel (Touvron et al. 2021, CaiT).
    layer_scale: bool = False

    # mean_max is half their sum; cls_mean is the concatenation [CLS, mean] (DINOv2's linear head).
    pool: Pool = "cls"
    # Mean, max and attention pooling include the prefix tokens.
    pool_prefix: bool = False
    # Of attention pooling; None is `heads`.
    pool_heads: Annotated[int, Field(ge=1, le=256)] | None = None
    # Hidden dimension of the attention pooling's MLP; None is `mlp_width`.
    pool_mlp_width: Annotated[int, Field(ge=1, le=131072)] | None = None
    final_norm: bool = True
    # The final LayerNorm stands after the pooling (timm's `fc_norm`) instead of before it.
    norm_after_pool: bool = False
    # What is pooled is projected to this width, without a bias (CLIP); the head reads that.
    projection_width: Annotated[int, Field(ge=1, le=16384)] | None = None
    # The head reads its input divided by its L2 norm; its rows are features of texts times a scale
    # (CLIP, SigLIP).
    normalized_head: bool = False
    # Of folders that were written when heads could have two layers.
    head_width: None = None
    head_activation: Activation = "tanh"
    # The distillation token has a linear head of its own; the logits of both are averaged.
    distillation_head: bool = False

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for problem, is_there in self._problems().items():
            if is_there:
                raise ValueError(problem)
        return self

    def _problems(self) -> dict[str, bool]:
        """Return the messages for fields that disagree or are together absurd, and whether each
        applies.
        """
        (rows, columns), patch, width = self.image_size, self.patch_size, self.width
        two_heads = self.distillation_head
        head_width = self.inner_width // self.heads
        stride = 1 if self.stem is None else self.stem.stride
        stride = stride if self.conv_stem is None else self.conv_stem.stride
        has_stem = self.stem is not None or self.conv_stem is not None
        for_texts = self.normalized_head or self.projection_width is not None
        pool_heads = self.pool_heads or self.heads
        return {
            f"image_size {rows}x{columns} is not a multiple of patch_size {patch}": (
                bool(rows % patch or columns % patch) and not self.drop_remainder
            ),
            f"image_size {rows}x{columns} is smaller than patch_size {patch}": rows < patch
            or columns < patch,
            f"patch_size {patch} is not a multiple of the stem's stride {stride}": patch % stride
            != 0,
            "a stem needs patch_embedding 'convolution'": has_stem
            and self.patch_embedding != "convolution",
            "there is one stem, not two": self.stem is not None and self.conv_stem is not None,
            f"width {self.inner_width} is not a multiple of heads {self.heads}": self.inner_width
            % self.heads
            != 0,
            f"width {width} is not a multiple of pool_heads {pool_heads}": (
                self.pool == "attention" and width % pool_heads != 0
            ),
            f"rotary needs heads of a multiple of 4, not {head_width}": self.rotary is not None
            and head_width % 4 != 0,
            "patch_norms needs patch_embedding 'linear'": self.patch_norms
            and self.patch_embedding != "linear",
            f"position_embedding 'sincos2d' needs a width that is a multiple of 4, not {width}": (
                self.position_embedding == "sincos2d" and width % 4 != 0
            ),
            f"{self.tokens} tokens are more than the {_MAX_TOKENS} that are allowed": self.tokens
            > _MAX_TOKENS,
            f"{self.largest_layer:,} numbers in a layer: at most {LARGEST_LAYER:,} are allowed": (
                self.largest_layer > LARGEST_LAYER
            ),
            f"pool {self.pool!r} needs class_token": self.pool in ("cls", "cls_mean")
            and not self.class_token,
            "distillation_token needs class_token and no registers": (
                self.distillation_token and (not self.class_token or self.registers > 0)
            ),
            "relative_position_bias allows no prefix token but class_token": (
                self.relative_position_bias and self.prefix_tokens > self.class_token
            ),
            "distillation_head needs distillation_token, pool 'cls' and the norm before the pooling": (
                two_heads
                and (not self.distillation_token or self.pool != "cls" or self.norm_after_pool)
            ),
            "projection_width and normalized_head need only one head": for_texts and two_heads,
            "norm_after_pool needs final_norm and another pool than 'cls_mean'": (
                self.norm_after_pool and (not self.final_norm or self.pool == "cls_mean")
            ),
            "pool 'attention' needs mlp 'plain' without mlp_norm": (
                self.pool == "attention" and (self.mlp != "plain" or self.mlp_norm)
            ),
        }

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
        """Return the most numbers that a layer gives for one image, which memory for a batch grows
        with.
        """
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
        """Return the dimension of queries, keys and values over all heads."""
        return self.attention_width or self.width

    @property
    def attention_source(self) -> AttentionSource:
        """Return the query whose attention a map of the last layer shows.

        It is the CLS token's where the head reads that, else the mean over all patch queries; with
        attention pooling it is the pooling query's (earlier layers then show the mean over patch
        queries), unless that has another number of heads.
        """
        if self.pool in ("cls", "cls_mean"):
            return "cls"
        return (
            "pool_query"
            if self.pool == "attention" and self.pool_heads in (None, self.heads)
            else "patch_mean"
        )


def cropped_from(size: Size, crop_pct: float) -> tuple[int, int]:
    """Return the (rows, columns) that a picture is resized to before a crop of `size`, rounded as
    timm rounds them.
    """
    return math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)


class PreprocessConfig(Frozen):
    """Preprocessing of an upright RGB picture of any size into the model's input.

    The picture is resized to `resize_size` and its centre of `size` is cut out:

    * `shortest_edge`: aspect kept, the picture just covers `resize_size` (torchvision `Resize(int)`).
    * `squash`: aspect given up, exactly `resize_size` (Hugging Face's ViT, timm's `crop_mode=squash`).

    Raises:
        pydantic.ValidationError: a field is missing, unknown, or out of range; or fields disagree.
    """

    # (rows, columns) of the model's input in pixels.
    size: Size
    resize: Literal["shortest_edge", "squash"]
    # (rows, columns) before the centre crop; each at least `size`.
    resize_size: Size
    # Share of the resized picture that the crop keeps, as timm states it: `resize_size` is
    # floor(size / crop_pct), here and at every other size. None where only the sizes are stated.
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
        """Return fields with the `resize_size` that `crop_pct` means, unless they state it."""
        if (
            not isinstance(fields, dict)
            or "resize_size" in fields
            or fields.get("crop_pct") is None
        ):
            return fields
        try:
            share = TypeAdapter(CropShare).validate_python(fields["crop_pct"])
            size = TypeAdapter(Size).validate_python(fields.get("size"))
        except ValidationError:  # which the fields themselves raise again, by their names
            return fields | {"resize_size": (1, 1)}
        return fields | {"resize_size": cropped_from(size, share)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        stated = None if self.crop_pct is None else cropped_from(self.size, self.crop_pct)
        if stated not in (None, self.resize_size):
            raise ValueError(
                f"resize_size {self.resize_size} is not floor(size / crop_pct), {stated}"
            )
        if len(self.mean) != len(self.std):
            raise ValueError(f"mean has {len(self.mean)} channels, std has {len(self.std)}")
        if self.resize_size[0] < self.size[0] or self.resize_size[1] < self.size[1]:
            raise ValueError(f"resize_size {self.resize_size} is smaller than size {self.size}")
        return self


# The paper's variants (Dosovitskiy et al. 2020, table 1), and Tiny and Small (Touvron et al. 2020).
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"width": 192, "depth": 12, "heads": 3, "mlp_width": 768},
    "small": {"width": 384, "depth": 12, "heads": 6, "mlp_width": 1536},
    "base": {"width": 768, "depth": 12, "heads": 12, "mlp_width": 3072},
    "large": {"width": 1024, "depth": 24, "heads": 16, "mlp_width": 4096},
    "huge": {"width": 1280, "depth": 32, "heads": 16, "mlp_width": 5120},
}
