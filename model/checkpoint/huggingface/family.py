"""`Family`: the declaration of one class of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from model.checkpoint.files import CONFIG_FILE
from model.checkpoint.huggingface.fields import Json, activation, number, tower_config
from model.checkpoint.huggingface.names import ENCODER
from model.checkpoint.huggingface.positions import Tensors, keep_positions
from model.checkpoint.input_size import StoredNetwork
from model.checkpoint.local_files import required, validating
from model.checkpoint.tensors import Rules, join_parts
from model.config import ViTConfig
from model.layer_config import Size

# Fields of `ViTConfig` and their names in `config.json`. They have no defaults, because the files
# on the hub state all of them, except for fields that a family computes.
_FIELDS: Final = {
    "width": "hidden_size",
    "depth": "num_hidden_layers",
    "heads": "num_attention_heads",
    "activation": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "in_channels": "num_channels",
    "mlp_width": "intermediate_size",
}
_NAMES: Final = {
    **_FIELDS,
    "registers": "num_register_tokens",
    "projection_width": "projection_dim",
}


def no_fields(json: Json, where: str) -> dict[str, Any]:
    """Return no fields, for a class that computes none."""
    return {}


@dataclass(frozen=True)
class Family:
    """One image classification class of transformers.

    Attributes:
        class_name: name in `architectures` of `config.json`.
        model_type: name in `model_type` of `config.json`.
        image_processor: class of its image processor if no file names one.
        rules: from its names of tensors to the model's, with queries, keys and values apart.
        unused: pattern of the names of tensors without a part in classification.
        fields: function from a config, and its name in messages, to fields of `ViTConfig` that only
            this class has.
        place: function that gives positions, and other tensors that need more than a new name, for
            an input size.
        architecture: fields of `ViTConfig` that the class itself fixes.
        vision_defaults: defaults of the nested `vision_config`, if the class has one.
        key_bias: whether keys have a bias, too, if queries and values have a bias.
        resizes: whether the class itself takes any input size, so that `place` resizes positions.
        antialias: whether its `interpolate_pos_encoding` low-passes positions.
    """

    class_name: str
    model_type: str
    image_processor: str
    rules: Rules = ENCODER
    unused: str = (
        r".*embeddings\.mask_token|.*pooler\.dense\.(weight|bias)|.*relative_position_index"
    )
    fields: Callable[[Json, str], dict[str, Any]] = no_fields
    place: Callable[[Tensors, ViTConfig, Size, str], StoredNetwork] = keep_positions
    architecture: Json = field(default_factory=dict)
    vision_defaults: Json | None = None
    key_bias: bool = True
    resizes: bool = False
    antialias: bool = False

    def vit_config(self, json: Json, classes: int, where: str = CONFIG_FILE) -> ViTConfig:
        """Return the architecture that a `config.json` describes.

        Raises:
            CheckpointError: a field is missing or wrong, beyond the limits, or inconsistent.
        """
        if self.vision_defaults is not None:
            json = {
                **self.vision_defaults,
                **json,
                **tower_config(json, "vision", where),
                "projection_dim": json.get("projection_dim", 512),
            }
        special = self.fields(json, where)
        fields = {
            ours: special.get(ours) or required(json, theirs, where)
            for ours, theirs in _FIELDS.items()
        }
        rows, columns = _two_edges(fields["image_size"])
        patch = _one_edge(fields["patch_size"])
        for name, value in (("image_size", rows), ("image_size", columns), ("patch_size", patch)):
            number(value, name, where)
        fields["image_size"] = (rows, columns)
        fields["patch_size"] = patch
        fields["drop_remainder"] = bool(rows % patch or columns % patch)
        fields["activation"] = activation(fields["activation"], where)
        fields["qkv_bias"] = json.get("qkv_bias", True)
        fields["num_classes"] = classes
        with validating(where, names=_NAMES):
            return ViTConfig.model_validate(fields | special | dict(self.architecture))

    def native(
        self, tensors: Mapping[str, Tensor], config: ViTConfig, size: Size, where: str
    ) -> StoredNetwork:
        """Return the architecture at an input size, and the tensors under the model's names.

        Args:
            tensors: tensors under the names that `rules` give.
            config: the architecture that `config.json` describes.
            size: (rows, columns) of the input in pixels, for families that resize positions.
            where: name of the checkpoint in messages.

        Raises:
            CheckpointError: a tensor that `place` needs is missing, of the wrong shape, or not
                floating point.
        """
        result = dict(tensors)
        join_parts(result, key_bias=self.key_bias)
        return self.place(result, config, size, where)


def _two_edges(size: Any) -> tuple[Any, Any]:
    """Return (rows, columns) of a size, which may be one number; `number` checks them."""
    if isinstance(size, list | tuple) and len(size) == 2:
        return size[0], size[1]
    return size, size


def _one_edge(patch: Any) -> Any:
    """Return the edge of a patch, which may be a list of two equal numbers; `number` checks it."""
    if isinstance(patch, list) and len(patch) == 2 and patch[0] == patch[1]:
        return patch[0]
    return patch
