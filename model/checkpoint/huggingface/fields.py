"""Fields of transformers' `config.json`, and the fields of `ViTConfig` that they become."""

from collections.abc import Mapping
from typing import Any, Final

from model.checkpoint.local_files import required
from model.errors import CheckpointError
from model.layer_config import Activation

Json = Mapping[str, Any]

_MAX_NUMBER: Final = 131072
# transformers/activations.py, ACT2FN.
_ACTIVATIONS: Final[dict[str, Activation]] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation(value: Any, where: str) -> Activation:
    """Return the model's name of an activation; raise `CheckpointError` for an unknown one."""
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise CheckpointError(
            f"{where}: hidden_act {value!r:.100} is not computed: give a model with one of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def tower_config(json: Json, kind: str, where: str) -> dict[str, Any]:
    """Return the config of the `text` or `vision` tower, which old files have twice.

    Raises:
        CheckpointError: it is not an object.
    """
    result: dict[str, Any] = {}
    for name in (f"{kind}_config", f"{kind}_config_dict"):
        part = json.get(name) or {}
        if not isinstance(part, dict):
            raise CheckpointError(f"{where}: {kind}_config: expected an object")
        result |= part
    return result


def number(value: Any, name: str, where: str, kind: type[int | float] = int) -> Any:
    """Return a value if it is a number of the kind within limits; else raise `CheckpointError`."""
    is_number = isinstance(value, int | kind) and not isinstance(value, bool)
    if not is_number or not 0 < float(value) <= _MAX_NUMBER:
        raise CheckpointError(
            f"{where}: {name} {value!r:.100}: expected a number above 0 and at most {_MAX_NUMBER}"
        )
    return value


def dinov2_fields(json: Json, where: str) -> dict[str, Any]:
    """Return the fields that only a config of DINOv2 states."""
    ratio = number(required(json, "mlp_ratio", where), "mlp_ratio", where, float)
    width = number(required(json, "hidden_size", where), "hidden_size", where)
    hidden = int(width * ratio)
    fields = {"mlp_width": hidden, "registers": json.get("num_register_tokens", 0)}
    if _flag(json, "use_swiglu_ffn", where):
        # SwiGLU keeps the number of parameters: two thirds, rounded up to a multiple of 8.
        gated = (int(hidden * 2 / 3) + 7) // 8 * 8
        fields |= {"mlp": "swiglu", "activation": "silu", "mlp_width": gated}
    return fields


def beit_fields(json: Json, where: str) -> dict[str, Any]:
    """Return the fields that only a config of BEiT or data2vec-vision states."""
    size = json.get("image_size")
    if isinstance(size, list) and len(set(size)) != 1:
        raise CheckpointError(f"{where}: image_size: its class reads square sizes only")
    is_mean = _flag(json, "use_mean_pooling", where)
    has_own_tables = _flag(json, "use_relative_position_bias", where)
    has_shared_table = _flag(json, "use_shared_relative_position_bias", where)
    is_absolute = _flag(json, "use_absolute_position_embeddings", where)
    scale = required(json, "layer_scale_init_value", where)
    has_scale = scale != 0 and number(scale, "layer_scale_init_value", where, float) > 0
    return {
        "position_embedding": "learned" if is_absolute else "none",
        "relative_position_bias": has_own_tables or has_shared_table,
        "layer_scale": has_scale,
        "pool": "mean" if is_mean else "cls",
        "norm_after_pool": is_mean,
    }


def siglip_fields(json: Json, where: str) -> dict[str, Any]:
    """Return an empty dict; refuse a tower without its pooling, which gives no features."""
    if json.get("vision_use_head", True) is not True:
        raise CheckpointError(
            f"{where}: vision_config.vision_use_head is not true: without its head the tower gives "
            "no features to compare with texts"
        )
    return {}


def _flag(json: Json, name: str, where: str) -> bool:
    value = required(json, name, where)
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} {value!r:.100}: expected true or false")
    return value
