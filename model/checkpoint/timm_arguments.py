"""Arguments of timm's models, and their meaning in this project's terms.

Source of names and defaults: timm/models/vision_transformer.py, deit.py,
vision_transformer_hybrid.py, beit.py, vision_transformer_relpos.py, eva.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor

from model.checkpoint.tensors import join_parts, renamed
from model.config import Pool, ViTConfig
from model.layer_config import Activation, Frozen, ResNetStem, RotaryPositions, Size

# timm has no `cls_mean`: DINOv2's classifiers read CLS and the mean of the patches.
TimmPool = Literal["token", "avg", "max", "avgmax", "map", "cls_mean"]
POOL: Final[dict[TimmPool, Pool]] = {
    "token": "cls",
    "avg": "mean",
    "max": "max",
    "avgmax": "mean_max",
    "map": "attention",
    "cls_mean": "cls_mean",
}
Pair = Annotated[
    Size, BeforeValidator(lambda value: (value, value) if type(value) is int else value)
]


class CommonArguments(Frozen):
    """Arguments that timm's `VisionTransformer` and `Eva` share, with the defaults of the first.

    Attributes:
        dynamic_img_size: whether the model resizes its own positions to the input.
        norm_eps: not timm's own name: its entry points pass a Python object.
    """

    img_size: Pair
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    in_chans: Annotated[int, Field(ge=1, le=4)] = 3
    patch_size: Annotated[int, Field(ge=1, le=1024)] = 16
    global_pool: TimmPool = "token"
    embed_dim: Annotated[int, Field(ge=1, le=16384)] = 768
    depth: Annotated[int, Field(ge=1, le=256)] = 12
    num_heads: Annotated[int, Field(ge=1, le=256)] = 12
    mlp_ratio: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] = 4.0
    qkv_bias: bool = True
    init_values: Annotated[float, Field(allow_inf_nan=False)] | None = None
    class_token: bool = True
    no_embed_class: bool = False
    dynamic_img_size: bool = False
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6

    @property
    def patch_edge(self) -> int:
        """Input pixels along a patch's edge."""
        return self.patch_size

    def common_fields(self) -> dict[str, Any]:
        """Return the fields of `ViTConfig` that follow from these arguments."""
        patch = self.patch_edge
        rows, columns = self.img_size
        return {
            "image_size": self.img_size,
            "patch_size": patch,
            "drop_remainder": bool(rows % patch or columns % patch),
            "width": self.embed_dim,
            "depth": self.depth,
            "heads": self.num_heads,
            "num_classes": self.num_classes,
            "in_channels": self.in_chans,
            "position_prefix": not self.no_embed_class,
            "class_token": self.class_token,
            "norm_eps": self.norm_eps,
            "qkv_bias": self.qkv_bias,
            "pool": POOL[self.global_pool],
        }


class TimmArguments(CommonArguments):
    """Arguments of timm's `VisionTransformer`, with its defaults.

    Attributes:
        mlp_layer, distilled, stem_layers: not timm's own names: its entry points pass Python
            objects.
        rel_pos: whether each block has relative position biases, from a table or an MLP, its own
            or shared by all blocks.
        norm_order, patch_bias, patch_norms, attn_dim: for networks that are not timm's.
    """

    qk_norm: bool = False
    scale_attn_norm: bool = False
    scale_mlp_norm: bool = False
    proj_bias: bool = True
    pos_embed: Literal["learn", "sincos2d", "none", ""] = "learn"
    reg_tokens: Annotated[int, Field(ge=0, le=1024)] = 0
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool | None = None
    pool_include_prefix: bool = False
    norm_layer: Literal["layernorm"] | None = None
    act_layer: Activation | None = None
    mlp_layer: Literal["SwiGLU", "SwiGLUPacked"] | None = None
    distilled: bool = False
    rel_pos: bool = False
    norm_order: Literal["pre", "post", "res_post"] = "pre"
    patch_bias: bool | None = None
    patch_norms: bool = False
    attn_dim: Annotated[int, Field(ge=1, le=16384)] | None = None
    stem_layers: tuple[int, ...] | None = None

    @property
    def stem(self) -> ResNetStem | None:
        """The ResNet before the Transformer; None if patches are cut from the image itself."""
        return None if self.stem_layers is None else ResNetStem(layers=self.stem_layers)

    @property
    def patch_edge(self) -> int:
        """Input pixels along a patch's edge."""
        return self.patch_size * (1 if self.stem is None else self.stem.stride)

    def vit_config(self) -> ViTConfig:
        """Return the same architecture in this project's terms.

        Raises:
            pydantic.ValidationError: arguments that timm would refuse too, or beyond this project's
                limits.
        """
        pool = POOL[self.global_pool]
        fc_norm = pool in ("mean", "max", "mean_max") if self.fc_norm is None else self.fc_norm
        hidden = int(self.embed_dim * self.mlp_ratio)
        return ViTConfig(
            **self.common_fields(),
            mlp_width=hidden // 2 if self.mlp_layer == "SwiGLUPacked" else hidden,
            stem=self.stem,
            patch_bias=not self.pre_norm if self.patch_bias is None else self.patch_bias,
            patch_norms=self.patch_norms,
            patch_embedding="linear" if self.patch_norms else "convolution",
            attention_width=self.attn_dim,
            position_embedding="learned" if self.pos_embed == "learn" else self.pos_embed or "none",
            relative_position_bias=self.rel_pos,
            distillation_token=self.distilled,
            registers=self.reg_tokens,
            norm_before_blocks=self.pre_norm,
            norm_order=self.norm_order,
            projection_bias=self.proj_bias,
            qk_norm=self.qk_norm,
            attention_norm=self.scale_attn_norm,
            mlp_norm=self.scale_mlp_norm,
            mlp="plain" if self.mlp_layer is None else "swiglu",
            activation=self.act_layer or ("gelu" if self.mlp_layer is None else "silu"),
            layer_scale=bool(self.init_values),
            pool_prefix=self.pool_include_prefix,
            final_norm=self.final_norm,
            norm_after_pool=self.final_norm and fc_norm,
            distillation_head=self.distilled,
        )


class EvaArguments(CommonArguments):
    """Arguments of timm's `Eva` (EVA, EVA-02, DINOv3, RoPE-ViT, PE), with its defaults.

    Its rotations have several layouts. This project has one: rows before columns, and the halves of
    an attention head together. `renamed` puts the features of queries and keys into this order,
    which does not change a score.

    Attributes:
        family: not timm's own name.
        attn_type: keys have a bias only in `rope`.
        use_post_norm: whether each branch ends with a norm, without a factor after it.
    """

    family: Literal["eva"]
    global_pool: TimmPool = "avg"
    qkv_fused: bool = True
    attn_type: Literal["eva", "rope"] = "eva"
    scale_attn_inner: bool = False
    swiglu_mlp: bool = False
    swiglu_align_to: Annotated[int, Field(ge=0, le=1024)] = 0
    scale_mlp: bool = False
    num_reg_tokens: Annotated[int, Field(ge=0, le=1024)] = 0
    use_abs_pos_emb: bool = True
    use_rot_pos_emb: bool = False
    rope_type: Literal["cat", "mixed", "dinov3"] = "cat"
    rope_grid_offset: float = 0.0
    rope_grid_indexing: Literal["ij", "xy"] = "ij"
    rope_temperature: float = 10_000.0
    rope_rotate_half: bool = False
    ref_feat_shape: Pair | None = None
    use_post_norm: bool = False
    use_pre_transformer_norm: bool = False
    use_post_transformer_norm: bool | None = None
    use_fc_norm: bool | None = None
    attn_pool_num_heads: Annotated[int, Field(ge=1, le=256)] | None = None
    attn_pool_mlp_ratio: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.qkv_fused and self.attn_type == "rope":
            raise ValueError("qkv_fused=False with attn_type='rope' is not read by this version")
        if self.rope_type == "dinov3" and self.rope_grid_offset:
            raise ValueError("rope_grid_offset with rope_type='dinov3' is not read by this version")
        if self._norm_after and self._norm_before:
            raise ValueError(
                "use_post_transformer_norm with use_fc_norm is not read by this version"
            )
        return self

    @property
    def _norm_after(self) -> bool:
        return self.global_pool == "avg" if self.use_fc_norm is None else self.use_fc_norm

    @property
    def _norm_before(self) -> bool:
        return (
            not self._norm_after
            if self.use_post_transformer_norm is None
            else self.use_post_transformer_norm
        )

    def vit_config(self) -> ViTConfig:
        """Return the same architecture in this project's terms.

        Raises:
            pydantic.ValidationError: arguments that timm would refuse too, or beyond this project's
                limits.
        """
        hidden = int(self.embed_dim * self.mlp_ratio)
        if self.swiglu_mlp and self.swiglu_align_to:
            hidden += -hidden % self.swiglu_align_to
        is_pooling = self.global_pool == "map"
        pool_mlp_ratio = self.attn_pool_mlp_ratio or self.mlp_ratio
        temperature = self.rope_temperature
        rotary: dict[str, RotaryPositions] = {
            "mixed": RotaryPositions(learned=True),
            "dinov3": RotaryPositions(temperature=temperature, centred=True),
            "cat": RotaryPositions(
                temperature=temperature,
                offset=self.rope_grid_offset,
                reference_grid=self.ref_feat_shape,
            ),
        }
        return ViTConfig(
            **self.common_fields(),
            mlp_width=hidden,
            patch_bias=not self.use_pre_transformer_norm,
            position_embedding="learned" if self.use_abs_pos_emb else "none",
            rotary=rotary[self.rope_type] if self.use_rot_pos_emb else None,
            registers=self.num_reg_tokens,
            norm_before_blocks=self.use_pre_transformer_norm,
            norm_order="res_post" if self.use_post_norm else "pre",
            attention_norm=self.scale_attn_inner,
            mlp="swiglu" if self.swiglu_mlp else "plain",
            mlp_norm=self.scale_mlp,
            activation="silu" if self.swiglu_mlp else "gelu",
            layer_scale=self.init_values is not None and not self.use_post_norm,
            pool_prefix=is_pooling,
            pool_heads=self.attn_pool_num_heads if is_pooling else None,
            pool_mlp_width=int(self.embed_dim * pool_mlp_ratio) if is_pooling else None,
            final_norm=self._norm_after or self._norm_before,
            norm_after_pool=self._norm_after,
        )

    def renamed(self, tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
        """Return tensors under the names and in the layout of timm's other classes.

        Each block gets its own frequencies. Later checks find tensors that are missing or of
        another shape; they are not changed here.
        """
        # Rotations that are not learned are computed, as timm does.
        kept = {
            name: tensor
            for name, tensor in tensors.items()
            if name == "rope.freqs" or not name.startswith("rope.")
        }
        result = renamed(kept, ((r"\.attn\.([qkv])_proj\.", r".attn.\1."),), where)
        join_parts(result, key_bias=self.attn_type == "rope" or not self.qkv_bias)
        for name, tensor in list(result.items()) if self.use_rot_pos_emb else ():
            if ".attn.qkv." in name and tensor.shape[:1] == (3 * self.embed_dim,):
                result[name] = self._in_order(tensor)
        frequencies = result.get("rope.freqs")
        if frequencies is None or self.rope_type != "mixed":
            return result
        shape = (2, self.depth, self.num_heads, self.embed_dim // self.num_heads // 2)
        if tuple(frequencies.shape) == shape:
            del result["rope.freqs"]
            axes = frequencies.flip(0) if self.rope_grid_indexing == "xy" else frequencies
            for block, part in enumerate(axes.unbind(1)):
                result[f"blocks.{block}.attn.rotary.frequencies"] = part
        return result

    def _in_order(self, tensor: Tensor) -> Tensor:
        """Return a fused projection or its bias, queries and keys in this project's order."""
        size = self.embed_dim // self.num_heads
        pairs = torch.arange(size // 2)
        if self.rope_grid_indexing == "xy" and self.rope_type != "mixed":
            pairs = pairs.roll(size // 4)
        order = torch.cat((2 * pairs, 2 * pairs + 1))
        if self.rope_rotate_half:
            order = torch.cat((pairs, pairs + size // 2))
        parts = tensor.reshape(3, self.num_heads, size, -1)
        return torch.cat((parts[:2].index_select(2, order), parts[2:])).reshape(tensor.shape)


def parse_arguments(arguments: Mapping[str, Any]) -> TimmArguments | EvaArguments:
    """Return the arguments of the architecture's class; raises pydantic.ValidationError."""
    kind = EvaArguments if arguments.get("family") == "eva" else TimmArguments
    return kind.model_validate(arguments)
