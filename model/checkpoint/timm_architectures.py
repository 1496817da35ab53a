"""timm's architectures: the meaning of each name and argument of its models in this project's terms.

Source of names and defaults: timm/models/vision_transformer.py, deit.py, vision_transformer_hybrid.py.
`timm_architectures.json` holds what each architecture's entry point passes to the model class, so that
a name alone says the whole architecture; models built of other parts (rotary positions, parallel
blocks, other norms) are refused by name.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from model.checkpoint.tensors import fuse_pairs
from model.config import Activation, Pool, ResNetStem, Size, ViTConfig
from model.errors import CheckpointError

_POOL: Final[dict[str, Pool]] = {"token": "cls", "avg": "mean", "max": "max", "avgmax": "mean_max", "map": "attention"}

_POSITIONS: Final[dict[str, Literal["learned", "sincos2d"]]] = {"learn": "learned", "sincos2d": "sincos2d"}


def _pair(value: Any) -> Any:
    return (value, value) if type(value) is int else value


class TimmArguments(BaseModel):
    """Arguments of timm's `VisionTransformer`, with that class's own defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    img_size: Annotated[Size, BeforeValidator(_pair)]
    num_classes: Annotated[int, Field(ge=0, le=1_000_000)]
    in_chans: Annotated[int, Field(ge=1, le=4)] = 3
    patch_size: Annotated[int, Field(ge=1, le=1024)] = 16
    global_pool: Literal["token", "avg", "max", "avgmax", "map"] = "token"
    embed_dim: Annotated[int, Field(ge=1, le=16384)] = 768
    depth: Annotated[int, Field(ge=1, le=256)] = 12
    num_heads: Annotated[int, Field(ge=1, le=256)] = 12
    mlp_ratio: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] = 4.0
    qkv_bias: bool = True
    qk_norm: bool = False
    proj_bias: bool = True
    init_values: Annotated[float, Field(allow_inf_nan=False)] | None = None
    class_token: bool = True
    pos_embed: Literal["learn", "sincos2d", "none", ""] = "learn"
    no_embed_class: bool = False
    reg_tokens: Annotated[int, Field(ge=0, le=1024)] = 0
    pre_norm: bool = False
    final_norm: bool = True
    fc_norm: bool | None = None
    pool_include_prefix: bool = False
    dynamic_img_size: bool = False
    """Whether the model resizes its own positions to the input."""
    norm_layer: Literal["layernorm"] | None = None
    act_layer: Activation | None = None
    # Not timm's own names: what its entry points pass as Python objects.
    norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    mlp_layer: Literal["SwiGLU", "SwiGLUPacked"] | None = None
    distilled: bool = False
    # Nor these: what networks of other code have.
    norm_order: Literal["pre", "post"] = "pre"
    patch_bias: bool | None = None
    patch_order: Literal["channels_first", "channels_last"] = "channels_first"
    """How a linear layer over patches counts the numbers of one."""
    qkv_order: Literal["3hd", "3dh", "h3d", "hd3", "d3h", "dh3"] = "3hd"
    """How the rows of a fused projection are counted: 3 of queries, keys and values, h heads, d numbers of a head."""
    head_hidden: Annotated[int, Field(ge=1, le=131072)] | None = None
    head_act: Activation | None = None
    conv_stem: Annotated[str, Field(max_length=200)] | None = None
    """Strides of convolutions, and the activations between them: `2-relu-2-relu-1`."""
    pooler: bool = False
    """Whether the head reads the CLS token through transformers' pooler."""
    stem_layers: tuple[int, ...] | None = None

    @property
    def stem(self) -> ResNetStem | None:
        """The ResNet before the Transformer, or None where patches are cut from the image itself."""
        return None if self.stem_layers is None else ResNetStem(layers=self.stem_layers)

    @property
    def patch_edge(self) -> int:
        """Input pixels along a patch's edge."""
        return self.patch_size * (1 if self.stem is None else self.stem.stride)

    def vit_config(self) -> ViTConfig:
        """Return the same architecture in this project's terms.

        Raises:
            pydantic.ValidationError: arguments that timm would refuse too, or beyond this project's limits.
        """
        pool = _POOL[self.global_pool]
        fc_norm = pool in ("mean", "max", "mean_max") if self.fc_norm is None else self.fc_norm
        patch = self.patch_edge
        rows, columns = self.img_size
        hidden = int(self.embed_dim * self.mlp_ratio)
        return ViTConfig(
            image_size=self.img_size,
            patch_size=patch,
            width=self.embed_dim,
            depth=self.depth,
            heads=self.num_heads,
            mlp_width=hidden // 2 if self.mlp_layer == "SwiGLUPacked" else hidden,
            num_classes=self.num_classes,
            in_channels=self.in_chans,
            drop_remainder=bool(rows % patch or columns % patch),
            stem=self.stem,
            patch_bias=not self.pre_norm if self.patch_bias is None else self.patch_bias,
            position_embedding=_POSITIONS.get(self.pos_embed, "none"),
            position_prefix=not self.no_embed_class,
            class_token=self.class_token,
            distillation_token=self.distilled,
            registers=self.reg_tokens,
            norm_before_blocks=self.pre_norm,
            norm_order=self.norm_order,
            norm_eps=self.norm_eps,
            qkv_bias=self.qkv_bias,
            projection_bias=self.proj_bias,
            qk_norm=self.qk_norm,
            mlp="plain" if self.mlp_layer is None else "swiglu",
            activation=self.act_layer or ("gelu" if self.mlp_layer is None else "silu"),
            layer_scale=bool(self.init_values),
            pool=pool,
            pool_prefix=self.pool_include_prefix,
            final_norm=self.final_norm,
            norm_after_pool=self.final_norm and fc_norm,
            head_width=self.head_hidden,
            head_activation=self.head_act or "tanh",
            distillation_head=self.distilled,
        )


@cache
def architectures() -> Mapping[str, dict[str, Any]]:
    """Return the arguments that each of timm's entry points passes to its model class, by architecture."""
    text = resources.files("model.checkpoint").joinpath("timm_architectures.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def architecture_arguments(name: str, where: str) -> dict[str, Any]:
    """Return the arguments of an architecture by timm's name.

    Raises:
        CheckpointError: no architecture of this name that is read here.
    """
    if name not in architectures():
        near = difflib.get_close_matches(name, architectures(), n=3, cutoff=0.6)
        raise CheckpointError(
            f"{where}: {name!r:.100} is none of the {len(architectures())} architectures of timm that this version "
            + (f"reads; near it are {', '.join(near)}" if near else "reads, such as vit_base_patch16_224")
        )
    return dict(architectures()[name])


def native_names(tensors: Mapping[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Return tensors without the few names and layouts in which timm's models differ from this project's one model."""
    renamed = dict(tensors)
    if config.stem is not None and not config.stem.layers:
        # A root without stages is timm's whole backbone.
        for name in [n for n in renamed if n.startswith(("patch_embed.backbone.conv.", "patch_embed.backbone.norm."))]:
            renamed[name.replace("backbone.", "backbone.stem.", 1)] = renamed.pop(name)
    if config.mlp == "swiglu":
        fuse_pairs(renamed, ".mlp.fc1_g.", ".mlp.fc1_x.", ".mlp.fc1.")
    return renamed
