"""The classes of transformers that are read: one declaration each, of names, config and positions.

Source: transformers/models/*/modeling_*.py and configuration_*.py. Names of tensors are those of
the hub's files and those that version 5 has in memory, with the model's own part before them
(`vit.`) or without, as classes without a head save them. To add a class, add one `Family` to
`FAMILIES`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from model.checkpoint.checkpoint import resized_config, resized_positions
from model.checkpoint.files import CONFIG_FILE
from model.checkpoint.local_files import required, validating
from model.checkpoint.tensors import Rules, join_parts, taken
from model.config import ViTConfig
from model.errors import CheckpointError
from model.layer_config import Activation, Size
from model.network.layers.position import relative_table_size

Json = Mapping[str, Any]
Tensors = dict[str, Tensor]
# An architecture at the input size that it is served at, and the tensors of its positions and what
# hangs on them.
Placed = tuple[ViTConfig, Tensors]

# transformers/activations.py, ACT2FN.
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

# Fields of `ViTConfig`, and what `config.json` calls them. None has a default: the files on the hub
# name all, but for those that a family computes.
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

# ViT, ViT-MSN, I-JEPA, DeiT, DINOv2, BEiT and data2vec-vision.
ENCODER: Final[Rules] = (
    (r"^(vit|ijepa|deit|dinov2|dinov2_with_registers|beit|data2vec_vision)\.", ""),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.cls_token$", "cls_token"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(?:encoder\.layer|layers)\.(\d+)\.", r"blocks.\1."),
    (r"^(?:encoder\.relative_position_bias|shared_position_bias)\.", "shared."),
    (
        r"\.(?:attention\.attention\.)?relative_position_bias\.relative_position_",
        ".attn.relative_position_",
    ),
    (r"\.attention\.(?:attention\.)?(q|k|v)(?:uery|ey|alue|_proj)\.", r".attn.\1."),
    (r"\.attention\.(?:output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^(blocks\.\d+)\.(?:intermediate\.dense|mlp\.weights_in)\.", r"\1.mlp.fc1."),
    (r"^(blocks\.\d+)\.(?:output\.dense|mlp\.weights_out|mlp\.down_proj)\.", r"\1.mlp.fc2."),
    (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
    (r"\.mlp\.up_proj\.", ".mlp.fc1_x."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"\.lambda_([12])$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^(?:cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)

# CLIP and SigLIP: the image's tower and the text's.
_TOWERS: Final[Rules] = (
    (r"^vision_model\.embeddings\.patch_embedding\.", "patch_embed.proj."),
    (r"^vision_model\.embeddings\.class_embedding$", "cls_token"),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "pos_embed"),
    (r"^text_model\.embeddings\.(token|position)_embedding\.", r"\1_embed."),
    (r"^position_embed\.", "pos_embed."),
    (r"^(?:vision|text)_model\.encoder\.layers\.(\d+)\.", r"blocks.\1."),
    (r"\.self_attn\.(q|k|v)_proj\.", r".attn.\1."),
    (r"\.self_attn\.out_proj\.", ".attn.proj."),
    (r"\.layer_norm([12])\.", r".norm\1."),
    (r"^vision_model\.pre_layrnorm\.", "norm_pre."),  # upstream's spelling
    (r"^(?:vision_model\.post|text_model\.final)_layer_?norm\.", "norm."),
    (r"^vision_model\.head\.probe$", "attn_pool.latent"),
    (r"^vision_model\.head\.attention\.out_proj\.", "attn_pool.proj."),
    (r"^vision_model\.head\.layernorm\.", "attn_pool.norm."),
    (r"^vision_model\.head\.mlp\.", "attn_pool.mlp."),
    (r"^visual_projection\.", "projection."),
    (r"^(?:classifier|text_projection|text_model\.head)\.", "head."),
)


@dataclass(frozen=True)
class Family:
    """One image classification class of transformers.

    Attributes:
        class_name: as `architectures` in `config.json` names it.
        model_type: as `config.json` names it.
        image_processor: the class of its image processor where no file names one.
        rules: from its names of tensors to the model's, queries, keys and values apart.
        unused: pattern of the names of tensors that have no part in classification.
        fields: fields of `ViTConfig` that only its config tells, of the config and its name in
        messages.
        place: positions, and what else is not one to one, at an input size.
        architecture: the fields of `ViTConfig` that the class itself fixes.
        vision_defaults: defaults of the nested `vision_config`, where the class has one.
        key_bias: whether keys have a bias where queries and values have one.
        resizes: the class itself takes any input size, and `place` resizes its positions.
        antialias: as its `interpolate_pos_encoding`.
    """

    class_name: str
    model_type: str
    image_processor: str
    rules: Rules = ENCODER
    unused: str = (
        r".*embeddings\.mask_token|.*pooler\.dense\.(weight|bias)|.*relative_position_index"
    )
    fields: Callable[[Json, str], dict[str, Any]] = lambda json, where: {}
    place: Callable[[Tensors, ViTConfig, Size, str], Placed] = lambda tensors, config, size, where: (
        config,
        tensors,
    )
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
            of_both = {"projection_dim": json.get("projection_dim", 512)}
            json = {**self.vision_defaults, **tower_config(json, "vision", where), **of_both}
        own = self.fields(json, where)
        fields = {
            ours: own.get(ours) or required(json, theirs, where) for ours, theirs in _FIELDS.items()
        }
        size, patch = fields["image_size"], fields["patch_size"]
        if isinstance(patch, list) and len(patch) == 2 and patch[0] == patch[1]:
            patch = patch[0]
        rows, columns = size if isinstance(size, list | tuple) and len(size) == 2 else (size, size)
        for name, value in (("image_size", rows), ("image_size", columns), ("patch_size", patch)):
            _number(value, name, where)
        fields |= {"image_size": (rows, columns), "patch_size": patch}
        fields |= {
            "activation": activation(fields["activation"], where),
            "qkv_bias": json.get("qkv_bias", True),
        }
        fields |= {"drop_remainder": bool(rows % patch or columns % patch), "num_classes": classes}
        with validating(where, names=_NAMES):
            return ViTConfig.model_validate(fields | own | dict(self.architecture))

    def native(
        self, tensors: Mapping[str, Tensor], config: ViTConfig, size: Size, where: str
    ) -> Placed:
        """Return the architecture at an input size, and the tensors by the model's names.

        Args:
            tensors: under the names of `rules`' results.
            config: as `config.json` describes it.
            size: (rows, columns) of the input in pixels; followed by families that resize their
            positions.
            where: what messages call the checkpoint.

        Raises:
            CheckpointError: a tensor that is placed anew is missing, of the wrong shape, or not
            floating point.
        """
        result = dict(tensors)
        join_parts(result, key_bias=self.key_bias)
        return self.place(result, config, size, where)


def activation(value: Any, where: str) -> Activation:
    """Return the model's name of an activation; CheckpointError where there is none."""
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise CheckpointError(
            f"{where}: hidden_act: activation {value!r:.100} is not one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[value]


def tower_config(json: Json, kind: str, where: str) -> dict[str, Any]:
    """Return the config of the `text` or `vision` tower, which old files have twice.

    Raises:
        CheckpointError: it is no object.
    """
    parts = [json.get(name) or {} for name in (f"{kind}_config", f"{kind}_config_dict")]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(f"{where}: {kind}_config: expected an object")
    return {**parts[0], **parts[1]}


def _number(value: Any, name: str, where: str, kind: type[int | float] = int) -> Any:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | kind)
        or not 0 < float(value) <= 131072
    ):
        raise CheckpointError(f"{where}: {name} {value!r:.100}: expected a number of 1 to 131072")
    return value


def _flag(json: Json, name: str, where: str) -> bool:
    value = required(json, name, where)
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {name} {value!r:.100}: expected true or false")
    return value


def _dinov2_fields(json: Json, where: str) -> dict[str, Any]:
    ratio = _number(required(json, "mlp_ratio", where), "mlp_ratio", where, float)
    hidden = int(_number(required(json, "hidden_size", where), "hidden_size", where) * ratio)
    fields = {"mlp_width": hidden, "registers": json.get("num_register_tokens", 0)}
    if _flag(json, "use_swiglu_ffn", where):
        # SwiGLU keeps the parameter count: two thirds, rounded up to a multiple of 8.
        fields |= {
            "mlp": "swiglu",
            "activation": "silu",
            "mlp_width": (int(hidden * 2 / 3) + 7) // 8 * 8,
        }
    return fields


def _placed_dinov2(
    tensors: Tensors, config: ViTConfig, size: Size, where: str, *, antialias: bool = False
) -> Placed:
    """Resize positions, which are a square whatever the config says of the image's size, as the
    class reads them.

    The class does it at each forward pass, for the released models always (trained at 518 px,
    preprocessed to 224 px).
    """
    width, patches = config.width, math.prod(config.grid)
    edge = math.isqrt(patches)
    if edge * edge != patches:
        raise CheckpointError(f"{where}: {patches} positions are not a square, as its class needs")
    positions = taken(tensors, "pos_embed", (1, patches + 1, width), where)
    if not config.registers and "reg_token" in tensors:
        taken(tensors, "reg_token", (1, 0, width), where)
    # CLS has an entry of its own and registers have none: it is added to the token once and for
    # all.
    tensors["cls_token"] = taken(tensors, "cls_token", (1, 1, width), where) + positions[:, :1]
    square = config.model_copy(
        update={"image_size": (edge * config.patch_size, edge * config.patch_size)}
    )
    resized = resized_config(config, size, where)
    return resized, resized_positions(
        tensors | {"pos_embed": positions[:, 1:]}, square, resized, antialias=antialias
    )


def _beit_fields(json: Json, where: str) -> dict[str, Any]:
    is_mean = _flag(json, "use_mean_pooling", where)
    tables = (
        _flag(json, "use_relative_position_bias", where),
        _flag(json, "use_shared_relative_position_bias", where),
    )
    size, scale = json.get("image_size"), required(json, "layer_scale_init_value", where)
    if isinstance(size, list) and len(set(size)) != 1:
        raise CheckpointError(f"{where}: image_size: its class reads square sizes only")
    return {
        "position_embedding": "learned"
        if _flag(json, "use_absolute_position_embeddings", where)
        else "none",
        "relative_position_bias": any(tables),
        "layer_scale": scale != 0 and _number(scale, "layer_scale_init_value", where, float) > 0,
        "pool": "mean" if is_mean else "cls",
        "norm_after_pool": is_mean,
    }


def _placed_beit(tensors: Tensors, config: ViTConfig, size: Size, where: str) -> Placed:
    """Resize positions; a table that all blocks share is added to each block's own, as the class
    adds both.
    """
    shape = relative_table_size(config.grid), config.heads
    name = "shared.relative_position_bias_table"
    shared = taken(tensors, name, shape, where) if name in tensors else None
    for index in range(config.depth if config.relative_position_bias else 0):
        name = f"blocks.{index}.attn.relative_position_bias_table"
        own = (
            taken(tensors, name, shape, where)
            if name in tensors or shared is None
            else torch.zeros(shape)
        )
        tensors[name] = own if shared is None else own + shared
    if config.position_embedding == "learned":
        tensors["pos_embed"] = taken(
            tensors, "pos_embed", (1, config.position_tokens, config.width), where
        )
    resized = resized_config(config, size, where)
    return resized, resized_positions(tensors, config, resized, antialias=False)


def _siglip_fields(json: Json, where: str) -> dict[str, Any]:
    """Return no fields; refuse a tower without its pooling, which gives no features of an image."""
    if json.get("vision_use_head", True) is not True:
        raise CheckpointError(
            f"{where}: vision_config.vision_use_head is not true: without its head the tower gives no features to "
            "compare with texts"
        )
    return {}


def _placed_tower(tensors: Tensors, config: ViTConfig, size: Size, where: str) -> Placed:
    """Give positions, an `nn.Embedding` [tokens, D], and the CLS token, a vector [D], the model's
    shapes.
    """
    tensors["pos_embed"] = taken(
        tensors, "pos_embed", (config.position_tokens, config.width), where
    ).unsqueeze(0)
    if config.class_token:
        tensors["cls_token"] = taken(tensors, "cls_token", (config.width,), where).reshape(1, 1, -1)
    for kind in ("weight", "bias") if config.pool == "attention" else ():
        shape = (3 * config.width, config.width) if kind == "weight" else (3 * config.width,)
        joined = taken(tensors, f"vision_model.head.attention.in_proj_{kind}", shape, where)
        tensors |= {
            f"attn_pool.q.{kind}": joined[: config.width],
            f"attn_pool.kv.{kind}": joined[config.width :],
        }
    return config, tensors


_VIT: Final = Family("ViTForImageClassification", "vit", "ViTImageProcessor")
_DEIT: Final = Family(
    "DeiTForImageClassification",
    "deit",
    "DeiTImageProcessor",
    architecture={"distillation_token": True},
)
_DINOV2: Final = Family(
    "Dinov2ForImageClassification",
    "dinov2",
    "BitImageProcessor",
    fields=_dinov2_fields,
    place=_placed_dinov2,
    architecture={"position_prefix": False, "layer_scale": True, "pool": "cls_mean"},
    resizes=True,
)
_BEIT: Final = Family(
    "BeitForImageClassification",
    "beit",
    "BeitImageProcessor",
    fields=_beit_fields,
    place=_placed_beit,
    architecture={"qkv_bias": True},
    key_bias=False,
    resizes=True,
)
_CLIP: Final = Family(
    "CLIPForImageClassification",
    "clip",
    "CLIPImageProcessor",
    rules=_TOWERS,
    # The head reads the mean of the patches before the last norm, which is therefore unused.
    unused=r"vision_model\.(post_layernorm\..*|embeddings\.position_ids)",
    place=_placed_tower,
    architecture={
        "patch_bias": False,
        "norm_before_blocks": True,
        "pool": "mean",
        "final_norm": False,
    },
    # Those of CLIPVisionConfig: nested configs name only what differs from their class.
    vision_defaults={
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_channels": 3,
        "image_size": 224,
        "patch_size": 32,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
)
_SIGLIP: Final = replace(
    _CLIP,
    class_name="SiglipForImageClassification",
    model_type="siglip",
    image_processor="SiglipImageProcessor",
    unused=r"vision_model\.(head\..*|embeddings\.position_ids)",
    architecture={"class_token": False, "pool": "mean"},
    # Those of SiglipVisionConfig; its other defaults are CLIPVisionConfig's.
    vision_defaults={
        **(_CLIP.vision_defaults or {}),
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
)
CLIP: Final = replace(
    _CLIP,
    class_name="CLIPModel",
    unused=r"vision_model\.embeddings\.position_ids",
    fields=lambda json, where: {"projection_width": json["projection_dim"]},
    architecture={"patch_bias": False, "norm_before_blocks": True, "normalized_head": True},
)
# CLIP and SigLIP whole, SigLIP 2 of one resolution among them.
SIGLIP: Final = replace(
    _SIGLIP,
    class_name="SiglipModel",
    unused=r"vision_model\.embeddings\.position_ids",
    fields=_siglip_fields,
    architecture={"class_token": False, "pool": "attention", "normalized_head": True},
)

FAMILIES: Final[tuple[Family, ...]] = (
    _VIT,
    replace(_VIT, class_name="ViTMSNForImageClassification", model_type="vit_msn"),
    replace(
        _VIT,
        class_name="IJepaForImageClassification",
        model_type="ijepa",
        architecture={"class_token": False, "pool": "mean"},
    ),
    _DEIT,
    replace(
        _DEIT,
        class_name="DeiTForImageClassificationWithTeacher",
        architecture={"distillation_token": True, "distillation_head": True},
    ),
    _DINOV2,
    replace(
        _DINOV2,
        class_name="Dinov2WithRegistersForImageClassification",
        model_type="dinov2_with_registers",
        place=partial(_placed_dinov2, antialias=True),
        antialias=True,
    ),
    _BEIT,
    replace(_BEIT, class_name="Data2VecVisionForImageClassification", model_type="data2vec-vision"),
    _SIGLIP,
    _CLIP,
    replace(_CLIP, class_name="MetaClip2ForImageClassification", model_type="metaclip_2"),
    CLIP,
    SIGLIP,
)
