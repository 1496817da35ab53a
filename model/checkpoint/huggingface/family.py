"""What a family of transformers' classes has to say of itself, and the parts that several share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from model.checkpoint.checkpoint import resized_preprocess
from model.checkpoint.files import TensorSource
from model.config import Activation, PreprocessConfig, Size, ViTConfig

_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
"""transformers/activations.py, ACT2FN."""

Converted = tuple[ViTConfig, dict[str, Tensor]]


def _pair(value: Any) -> Any:
    return (value, value) if type(value) is int else tuple(value) if isinstance(value, list) else value


def _square(value: Any) -> Any:
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return value[0]
    return value


def _activation(value: Any) -> Any:
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ValueError(f"activation {value!r:.100} is not one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[value]


Count = Annotated[int, Field(ge=1, le=131072)]


class VisionConfig(BaseModel):
    """The fields of transformers' vision configs that change an answer; the others are not looked at.

    None has a default here: the files on the hub name them all. `qkv_bias` is younger than the
    oldest files, where biases were not optional; a wrong value could not be silent, as the biases
    would be missing or unexpected.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    hidden_act: Annotated[Activation, BeforeValidator(_activation)]
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    image_size: Annotated[Size, BeforeValidator(_pair)]
    patch_size: Annotated[int, BeforeValidator(_square), Field(ge=1, le=1024)]
    num_channels: Annotated[int, Field(ge=1, le=4)]
    qkv_bias: bool = True

    def vit_config(self, *, mlp_width: int, num_classes: int, **more: Any) -> ViTConfig:
        """This architecture in the project's terms.

        Raises:
            pydantic.ValidationError: beyond the project's limits, or inconsistent.
        """
        rows, columns = self.image_size
        fields = {
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "width": self.hidden_size,
            "depth": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "mlp_width": mlp_width,
            "num_classes": num_classes,
            "in_channels": self.num_channels,
            "drop_remainder": bool(rows % self.patch_size or columns % self.patch_size),
            "activation": self.hidden_act,
            "norm_eps": self.layer_norm_eps,
            "qkv_bias": self.qkv_bias,
        }
        return ViTConfig.model_validate(fields | more)


@dataclass(frozen=True)
class Family:
    """One class of transformers that classifies images.

    Attributes:
        class_name: as `architectures` in `config.json` names it.
        model_type: as `config.json` names it.
        classifier: the tensor whose first dimension is the number of classes.
        config: (the JSON, number of classes) -> architecture; raises pydantic.ValidationError.
        convert: (tensors, architecture, (rows, columns) of the input) -> architecture and tensors in
            the project's names. A family that resizes its own positions returns another input size.
        unused: whether a tensor is known and has no part in classification.
        image_processor: the class of its image processor where no file names one.
        antialias: as its `interpolate_pos_encoding`.
        hub_names: tensors under the names of the hub's files, where versions of transformers differ.
        resizes: the class itself takes any input size (DINOv2, BEiT).
    """

    class_name: str
    model_type: str
    classifier: str
    config: Callable[[dict[str, Any], int], ViTConfig]
    convert: Callable[[TensorSource, ViTConfig, Size], Converted]
    unused: Callable[[str], bool]
    image_processor: str
    antialias: bool = False
    hub_names: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda tensors: tensors
    resizes: bool = False

    def preprocess_at(self, preprocess: PreprocessConfig, config: ViTConfig) -> PreprocessConfig:
        """Preprocessing for the input size that `convert` was asked for, where the family followed it."""
        return resized_preprocess(preprocess, config.image_size) if self.resizes else preprocess


class BlockNames(NamedTuple):
    """Where a block's tensors are, relative to the block's own prefix; `{}` is its number."""

    prefix: str
    query: str
    key: str
    value: str
    output: str
    norm1: str
    norm2: str
    fc1: str
    fc2: str
    scale1: str = ""
    scale2: str = ""


def encoder_names(model: str) -> BlockNames:
    """The layout that ViT, DeiT and BEiT share on the hub."""
    return BlockNames(
        prefix=f"{model}.encoder.layer.{{}}.",
        query="attention.attention.query",
        key="attention.attention.key",
        value="attention.attention.value",
        output="attention.output.dense",
        norm1="layernorm_before",
        norm2="layernorm_after",
        fc1="intermediate.dense",
        fc2="output.dense",
    )


def rename_encoder(model: str) -> Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]:
    """From transformers 5's names in memory to those of the hub, for ViT, DeiT and BEiT."""
    changes = (
        (f"{model}.layers.", f"{model}.encoder.layer."),
        (".attention.q_proj.", ".attention.attention.query."),
        (".attention.k_proj.", ".attention.attention.key."),
        (".attention.v_proj.", ".attention.attention.value."),
        (".attention.o_proj.", ".attention.output.dense."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
    )

    def rename(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        renamed = {}
        for name, tensor in tensors.items():
            for old, new in changes:
                name = name.replace(old, new)  # noqa: PLW2901
            renamed[name] = tensor
        return renamed

    return rename


def take_linear(
    stored: TensorSource, name: str, to: str, out: int, width: int, *, bias: bool = True
) -> dict[str, Tensor]:
    """Weight [out, width] and bias [out] of a linear layer, under a new name."""
    taken = {f"{to}.weight": stored.take(f"{name}.weight", out, width)}
    if bias:
        taken[f"{to}.bias"] = stored.take(f"{name}.bias", out)
    return taken


def take_norm(stored: TensorSource, name: str, to: str, width: int) -> dict[str, Tensor]:
    """Weight and bias [width] of a LayerNorm, under a new name."""
    return {
        f"{to}.weight": stored.take(f"{name}.weight", width),
        f"{to}.bias": stored.take(f"{name}.bias", width),
    }


def take_patches(stored: TensorSource, name: str, config: ViTConfig) -> dict[str, Tensor]:
    """The patch embedding's convolution."""
    patch = config.patch_size
    taken = {"patch_embed.proj.weight": stored.take(f"{name}.weight", config.width, config.in_channels, patch, patch)}
    if config.patch_bias:
        taken["patch_embed.proj.bias"] = stored.take(f"{name}.bias", config.width)
    return taken


def take_attention(
    stored: TensorSource, names: BlockNames, block: str, to: str, config: ViTConfig, *, key_bias: bool = True
) -> dict[str, Tensor]:
    """Three projections fused into one, and the output projection.

    Args:
        key_bias: BEiT's keys have none, which is a bias of zero.
    """
    width = config.width
    parts = [block + name for name in (names.query, names.key, names.value)]
    taken = {f"{to}.qkv.weight": torch.cat([stored.take(f"{part}.weight", width, width) for part in parts])}
    if config.qkv_bias:
        biases = [
            stored.take(f"{part}.bias", width) if key_bias or part != parts[1] else torch.zeros(width) for part in parts
        ]
        taken[f"{to}.qkv.bias"] = torch.cat(biases)
    return taken | take_linear(stored, block + names.output, f"{to}.proj", width, width, bias=config.projection_bias)


def take_blocks(
    stored: TensorSource, names: BlockNames, config: ViTConfig, *, key_bias: bool = True, mlp: bool = True
) -> dict[str, Tensor]:
    """All blocks; without their MLPs where a family has another kind."""
    taken: dict[str, Tensor] = {}
    width = config.width
    for index in range(config.depth):
        block, to = names.prefix.format(index), f"blocks.{index}"
        taken |= take_norm(stored, block + names.norm1, f"{to}.norm1", width)
        taken |= take_attention(stored, names, block, f"{to}.attn", config, key_bias=key_bias)
        taken |= take_norm(stored, block + names.norm2, f"{to}.norm2", width)
        if mlp:
            taken |= take_linear(stored, block + names.fc1, f"{to}.mlp.fc1", config.mlp_width, width)
            taken |= take_linear(stored, block + names.fc2, f"{to}.mlp.fc2", width, config.mlp_width)
        if config.layer_scale:
            taken[f"{to}.ls1.gamma"] = stored.take(block + names.scale1, width)
            taken[f"{to}.ls2.gamma"] = stored.take(block + names.scale2, width)
    return taken
