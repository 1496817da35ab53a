"""open_clip's folder: `open_clip_config.json` and its weights.

The image tower is read, for embeddings as `encode_image` gives them: the pooled features, projected
as the model projects them. Source of names and defaults: open_clip/model.py (CLIPVisionCfg),
transformer.py (VisionTransformer), timm_model.py and transform.py.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import OPEN_CLIP_CONFIG, Files
from model.checkpoint.input_size import StoredNetwork
from model.checkpoint.local_files import required, validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.tensors import Rules, renamed
from model.checkpoint.timm_architectures import architectures, runs_in_library
from model.checkpoint.timm_arguments import POOL, Pair, TimmPool, parse_arguments
from model.checkpoint.timm_names import native_names
from model.checkpoint.unread_files import refuse_unread
from model.config import PreprocessConfig, ViTConfig
from model.errors import CheckpointError
from model.layer_config import Frozen

FORMAT: Final = "open_clip"

_WEIGHTS: Final = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_VISUAL: Final = "visual."
_TRUNK: Final = "trunk."
_PROJECTION: Final = "projection.weight"
_NOTE: Final = "open_clip: the image tower is read, for embeddings; the text tower is not"

_NAMES: Final[Rules] = (
    (r"^class_embedding$", "cls_token"),
    (r"^positional_embedding$", "pos_embed"),
    (r"^conv1\.", "patch_embed.proj."),
    (r"^ln_pre\.", "norm_pre."),
    (r"^ln_post\.", "norm."),
    (r"^proj$", _PROJECTION),
    (r"^transformer\.resblocks\.(\d+)\.ln_([12])\.", r"blocks.\1.norm\2."),
    (r"^transformer\.resblocks\.(\d+)\.attn\.in_proj_", r"blocks.\1.attn.qkv."),
    (r"^transformer\.resblocks\.(\d+)\.attn\.out_proj\.", r"blocks.\1.attn.proj."),
    (r"^transformer\.resblocks\.(\d+)\.mlp\.c_fc\.", r"blocks.\1.mlp.fc1."),
    (r"^transformer\.resblocks\.(\d+)\.mlp\.c_proj\.", r"blocks.\1.mlp.fc2."),
    (r"^transformer\.resblocks\.(\d+)\.ls_([12])\.", r"blocks.\1.ls\2."),
)

Edge = Annotated[int, Field(ge=1, le=16384)]
Statistics = tuple[float, float, float]


class _Norm(Frozen):
    """Arguments of the norms."""

    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5


class _Tower(BaseModel):
    """The fields of a `vision_cfg`; unsupported steps must be off, training is ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image_size: Pair = (224, 224)
    layers: Annotated[int, Field(ge=1, le=256)] = 12
    width: Edge = 768
    head_width: Edge = 64
    mlp_ratio: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] = 4.0
    patch_size: Edge | None = 16
    ls_init_value: float | None = None
    no_ln_pre: bool = False
    # The file holds the positions of either type.
    pos_embed_type: Literal["learnable", "sin_cos_2d"] = "learnable"
    final_ln_after_pool: bool = False
    pool_type: Literal["tok", "avg"] = "tok"
    norm_kwargs: _Norm | None = None
    act_kwargs: None = None
    attentional_pool: Literal[False] = False
    block_type: Literal["default"] | None = None
    qk_norm: Literal[False] = False
    scaled_cosine_attn: Literal[False] = False
    scale_heads: Literal[False] = False
    scale_attn_inner: Literal[False] = False
    scale_attn: Literal[False] = False
    scale_fc: Literal[False] = False

    timm_model_name: str | None = None
    timm_pool: TimmPool | Literal[""] = "avg"
    timm_proj: Literal["linear", "none", ""] | None = "linear"
    timm_proj_bias: Literal[False] = False

    # Of training, or of parts that are refused above.
    timm_model_pretrained: Any = None
    timm_drop: Any = None
    timm_drop_path: Any = None
    patch_dropout: Any = None
    output_tokens: Any = None
    attn_pooler_queries: Any = None
    attn_pooler_heads: Any = None


class _Preprocess(BaseModel):
    """The fields of a `preprocess_cfg`, with the defaults of `PreprocessCfg`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    mode: Literal["RGB"] = "RGB"
    mean: Statistics | float = (0.48145466, 0.4578275, 0.40821073)
    std: Statistics | float = (0.26862954, 0.26130258, 0.27577711)
    interpolation: Literal["bicubic", "bilinear", "random"] = "bicubic"
    resize_mode: Literal["shortest", "squash", "longest"] = "shortest"


def read(files: Files, options: CheckpointOptions) -> Checkpoint | None:
    """Read a folder as open_clip's `save_for_hf` writes it; return None for any other."""
    if files.path(OPEN_CLIP_CONFIG) is None:
        return None
    refuse_unread(files, options)
    where = files.where(OPEN_CLIP_CONFIG)
    config = files.json(OPEN_CLIP_CONFIG)
    if options.labels not in (None, "numbers"):
        raise CheckpointError(
            f"{where}: open_clip's text tower is not read, so labels have no effect: leave "
            "VIT_LABELS (--labels) out to serve embeddings, or give the model in transformers' "
            "form (CLIPModel, SiglipModel), whose text tower is read"
        )
    model = _object(required(config, "model_cfg", where), "model_cfg", where)
    vision = _object(required(model, "vision_cfg", where), "model_cfg.vision_cfg", where)
    if isinstance(vision.get("layers"), list):
        raise CheckpointError(
            f"{where}: its image tower is a ResNet; towers that are Vision Transformers are read"
        )
    with validating(where, "model_cfg.vision_cfg."):
        tower = _Tower.model_validate(vision)
    stated = _object(config.get("preprocess_cfg") or {}, "preprocess_cfg", where)
    carried = None
    assumed: tuple[str, ...] = ()
    if not options.preprocess:
        carried = _preprocess(stated, tower, where)
        assumed = _assumed(stated)
    files.weights = (*_WEIGHTS, *files.weights)
    width = required(model, "embed_dim", where)
    with validating(where, "model_cfg."):
        if tower.timm_model_name is None:
            is_quick = bool(model.get("quick_gelu"))
            network = _own_tower(files, tower, width, is_quick=is_quick)
        else:
            network = _timm_tower(files, tower, width, tower.timm_model_name)
    return Checkpoint(
        name=files.name,
        source=files.source,
        format=FORMAT,
        architecture=tower.timm_model_name or "VisionTransformer",
        config=network.config,
        preprocess=options.preprocess_or(carried, where),
        labels=(),
        tensors=native_tensors(network.tensors, network.config, files.title),
        multi_label=False,
        notes=(_NOTE,),
        assumed=assumed,
    )


def _assumed(stated: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note of the fields of the preprocessing that the config leaves out."""
    fields = ("mean", "std", "interpolation", "resize_mode")
    names = [name for name in fields if stated.get(name) is None]
    if not names:
        return ()
    return (f"preprocessing: {', '.join(names)} of open_clip's default (VIT_PREPROCESS)",)


def _object(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {name}: expected an object")
    return value


def _preprocess(stated: Mapping[str, Any], tower: _Tower, where: str) -> PreprocessConfig:
    """Return the preprocessing of `image_transform_v2`, at the size of the tower."""
    with validating(where, "preprocess_cfg."):
        read = _Preprocess.model_validate(
            {name: value for name, value in stated.items() if value is not None}
        )
    rows, columns = tower.image_size
    if read.resize_mode == "longest" or (read.resize_mode == "shortest" and rows != columns):
        raise CheckpointError(
            f"{where}: preprocess_cfg.resize_mode {read.resize_mode!r} at {rows}x{columns} pixels "
            "is not computed: set VIT_PREPROCESS to another preprocessing"
        )
    fields = {
        "size": tower.image_size,
        "resize": "squash" if read.resize_mode == "squash" else "shortest_edge",
        "resize_size": tower.image_size,
        "interpolation": "bilinear" if read.interpolation == "bilinear" else "bicubic",
        "mean": read.mean if isinstance(read.mean, tuple) else (read.mean,) * 3,
        "std": read.std if isinstance(read.std, tuple) else (read.std,) * 3,
    }
    with validating(where, "preprocess_cfg."):
        return PreprocessConfig.model_validate(fields)


def _visual(files: Files) -> dict[str, Tensor]:
    """Return the tensors of the image tower, under the names within it."""
    return {
        name.removeprefix(_VISUAL): tensor
        for name, tensor in files.tensors().items()
        if name.startswith(_VISUAL)
    }


def _own_tower(files: Files, tower: _Tower, width: int, *, is_quick: bool) -> StoredNetwork:
    """Return open_clip's own Vision Transformer; raises pydantic.ValidationError."""
    rows, columns = tower.image_size
    patch = tower.patch_size
    norm = tower.norm_kwargs or _Norm()
    fields = {
        "image_size": tower.image_size,
        "patch_size": patch,
        "drop_remainder": bool(patch and (rows % patch or columns % patch)),
        "width": tower.width,
        "depth": tower.layers,
        "heads": tower.width // tower.head_width,
        "mlp_width": int(tower.width * tower.mlp_ratio),
        "num_classes": 0,
        "in_channels": 3,
        "patch_bias": False,
        "norm_before_blocks": not tower.no_ln_pre,
        "norm_eps": norm.eps,
        "activation": "quick_gelu" if is_quick else "gelu",
        "layer_scale": tower.ls_init_value is not None,
        "pool": "mean" if tower.pool_type == "avg" else "cls",
        "norm_after_pool": tower.pool_type == "avg" and tower.final_ln_after_pool,
        "projection_width": width,
    }
    config = ViTConfig.model_validate(fields)
    tensors = renamed(_visual(files), _NAMES, files.title)
    if config.norm_after_pool:
        tensors = renamed(tensors, ((r"^norm\.", "fc_norm."),), files.title)
    for name, dimensions in (("cls_token", 1), ("pos_embed", 2)):
        stored = tensors.get(name)
        if stored is not None and stored.ndim == dimensions:
            tensors[name] = stored.reshape(1, -1, stored.shape[-1])
    if _PROJECTION in tensors and tensors[_PROJECTION].ndim == 2:
        tensors[_PROJECTION] = tensors[_PROJECTION].T.contiguous()
    return StoredNetwork(config, tensors)


def _timm_tower(files: Files, tower: _Tower, width: int, name: str) -> StoredNetwork:
    """Return a Vision Transformer of timm; raises pydantic.ValidationError."""
    where = files.where(OPEN_CLIP_CONFIG)
    if runs_in_library(name, where):
        raise CheckpointError(
            f"{where}: timm_model_name {name!r:.100}: towers that are plain Vision Transformers "
            "are read; others of timm with a classification head only, as folders of timm"
        )
    arguments = architectures()[name] | {"img_size": tower.image_size, "num_classes": 0}
    own_pool = parse_arguments(arguments).global_pool
    has_linear = tower.timm_proj == "linear"
    # With its own projection, open_clip changes the pooling, but the norms are for the old one.
    pools = ("", own_pool) if has_linear else tuple(POOL)
    if tower.timm_pool not in pools:
        known = ", ".join(map(repr, pools))
        raise CheckpointError(
            f"{where}: timm_pool {tower.timm_pool!r} with timm_proj {tower.timm_proj!r}: expected "
            f"{known}"
        )
    parsed = parse_arguments(arguments | {"global_pool": tower.timm_pool or own_pool})
    config = parsed.vit_config()
    projects = tower.timm_proj != "none"
    if projects:
        config = config.model_copy(update={"projection_width": width})
    tensors = {name.removeprefix(_TRUNK): tensor for name, tensor in _visual(files).items()}
    if has_linear and "head.proj.weight" in tensors:
        tensors[_PROJECTION] = tensors.pop("head.proj.weight")
    elif projects and "head.weight" in tensors:
        tensors[_PROJECTION] = tensors.pop("head.weight")
        bias = tensors.pop("head.bias", None)
        if bias is not None and bias.any():
            raise CheckpointError(f"{files.title}: its projection has a bias, which is not read")
    return StoredNetwork(config, native_names(tensors, parsed, config, files.title))
