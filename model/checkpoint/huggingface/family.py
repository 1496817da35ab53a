"""The interface of a family of transformers' classes, and code that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor

from model.checkpoint.tensors import Names, TensorSource, renamed, take_model
from model.config import Activation, Size, ViTConfig

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
HiddenActivation = Annotated[Activation, BeforeValidator(_activation)]


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
    hidden_act: HiddenActivation
    layer_norm_eps: Annotated[float, Field(gt=0, lt=1)]
    image_size: Annotated[Size, BeforeValidator(_pair)]
    patch_size: Annotated[int, BeforeValidator(_square), Field(ge=1, le=1024)]
    num_channels: Annotated[int, Field(ge=1, le=4)]
    qkv_bias: bool = True

    def architecture(self) -> dict[str, Any]:
        """Return the fields of a `ViTConfig` that these fields decide."""
        rows, columns = self.image_size
        return {
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "width": self.hidden_size,
            "depth": self.num_hidden_layers,
            "heads": self.num_attention_heads,
            "in_channels": self.num_channels,
            "drop_remainder": bool(rows % self.patch_size or columns % self.patch_size),
            "activation": self.hidden_act,
            "norm_eps": self.layer_norm_eps,
            "qkv_bias": self.qkv_bias,
        }


class MlpConfig(VisionConfig):
    """The fields of a config whose class names the width of its MLP."""

    intermediate_size: Count

    def architecture(self) -> dict[str, Any]:
        """Return the fields of a `ViTConfig` that these fields decide."""
        return super().architecture() | {"mlp_width": self.intermediate_size}


@dataclass(frozen=True)
class Family:
    """One image classification class of transformers and its differences from the others.

    Attributes:
        class_name: as `architectures` in `config.json` names it.
        model_type: as `config.json` names it.
        image_processor: the class of its image processor where no file names one.
        names: the hub's names of the model's modules; see `take_model`.
        unused: pattern of the names of tensors that have no part in classification.
        config: the fields that its `config.json` has to have.
        architecture: the fields of `ViTConfig` that the class itself fixes.
        vision_defaults: defaults of the nested `vision_config`, where the class has one.
        renames: patterns of the names that transformers 5 has in memory, and the hub's names.
        resizes: the class itself takes any input size, and `convert` resizes its positions.
        antialias: as its `interpolate_pos_encoding`.
        each_its_size: its image processor gives each picture a size of its own, so that the operator has to say one.
    """

    class_name: str
    model_type: str
    image_processor: str
    names: Names
    unused: str
    config: type[VisionConfig] = MlpConfig
    architecture: Mapping[str, Any] = field(default_factory=dict)
    vision_defaults: Mapping[str, Any] | None = None
    renames: tuple[tuple[str, str], ...] = ()
    resizes: bool = False
    antialias: bool = False
    each_its_size: bool = False

    @property
    def classifier(self) -> str:
        """Return the name of the tensor whose first dimension is the number of classes."""
        return f"{self.names['head']}.weight"

    def vit_config(self, json: Mapping[str, Any], classes: int) -> ViTConfig:
        """Return the architecture that a `config.json` describes.

        Raises:
            pydantic.ValidationError: a field is missing or wrong, beyond the limits, or inconsistent.
        """
        if self.vision_defaults is not None:
            nested = json.get("vision_config")
            json = {**self.vision_defaults, **nested} if isinstance(nested, dict) else {}
        fields = self.config.model_validate(json).architecture()
        return ViTConfig.model_validate(fields | dict(self.architecture) | {"num_classes": classes})

    def hub_names(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the names of the hub's files, whichever version of transformers saved them."""
        return renamed(tensors, self.renames)

    def convert(self, stored: TensorSource, config: ViTConfig, size: Size) -> tuple[ViTConfig, dict[str, Tensor]]:
        """Return the architecture and the model's tensors, float32.

        Args:
            stored: tensors under the names of the hub's files.
            config: the architecture as `config.json` describes it.
            size: (rows, columns) of the input in pixels; followed by families that resize their positions.

        Raises:
            CheckpointError: a tensor is missing, of the wrong shape, or not floating point.
        """
        return config, take_model(stored, config, self.names)


ATTENTION_RENAMES: Final = (
    (r"\.attention\.q_proj\.", ".attention.attention.query."),
    (r"\.attention\.k_proj\.", ".attention.attention.key."),
    (r"\.attention\.v_proj\.", ".attention.attention.value."),
    (r"\.attention\.o_proj\.", ".attention.output.dense."),
)


def encoder_renames(model: str) -> tuple[tuple[str, str], ...]:
    """Return the renames of ViT, DeiT and BEiT."""
    return (
        (rf"{model}\.layers\.", f"{model}.encoder.layer."),
        *ATTENTION_RENAMES,
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
    )


def encoder_names(model: str) -> dict[str, str | tuple[str | None, ...]]:
    """Return the names that ViT, DeiT and BEiT have on the hub, and DINOv2 in part."""
    embeddings, layer = f"{model}.embeddings", f"{model}.encoder.layer.{{}}"
    attention = f"{layer}.attention.attention"
    return {
        "cls_token": f"{embeddings}.cls_token",
        "pos_embed": f"{embeddings}.position_embeddings",
        "patch_embed.proj": f"{embeddings}.patch_embeddings.projection",
        "blocks.{}.norm1": f"{layer}.layernorm_before",
        "blocks.{}.attn.qkv": (f"{attention}.query", f"{attention}.key", f"{attention}.value"),
        "blocks.{}.attn.proj": f"{layer}.attention.output.dense",
        "blocks.{}.norm2": f"{layer}.layernorm_after",
        "blocks.{}.mlp.fc1": f"{layer}.intermediate.dense",
        "blocks.{}.mlp.fc2": f"{layer}.output.dense",
        "norm": f"{model}.layernorm",
        "head": "classifier",
    }
