"""The original JAX releases: `.npz` files of google-research/vision_transformer (AugReg) and big_vision.

Names and shapes: vit_jax/models_vit.py and big_vision/models/vit.py; timm's `_load_weights` reads the
same. The activation is JAX's GELU, the tanh approximation, which the weights were trained with (timm
and transformers run them with the exact GELU).
"""

import math
import re
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.local_files import validating
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.tensors import Rules, join, join_parts, renamed, shape_of
from model.config import ViTConfig
from model.errors import CheckpointError

FORMAT: Final = "jax"

# Of the network's arrays in those of an optimiser, or of a model of two towers.
_PREFIXES: Final = ("opt/target/", "params/img/", "params/")
_BLOCK: Final = "Transformer/encoderblock"
_RULES: Final[Rules] = (
    (r"/(kernel|scale)$", "/weight"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks.\1/"),
    (r"^MAPHead_0/", "attn_pool/"),
    (r"/MultiHeadDotProductAttention_\d/", "/attn/"),
    (r"^attn_pool/attn/", "attn_pool/"),
    (r"^(blocks.*)/LayerNorm_0/", r"\1/norm1/"),
    (r"^(blocks.*)/LayerNorm_[12]/", r"\1/norm2/"),
    (r"/LayerNorm_0/", "/norm/"),
    (r"/MlpBlock_\d/Dense_0/", "/mlp/fc1/"),
    (r"/MlpBlock_\d/Dense_1/", "/mlp/fc2/"),
    (r"/(q|k|v)(?:uery|ey|alue)/", r"/\1/"),
    (r"/out/", "/proj/"),
    (r"^Transformer/encoder_norm/", "norm/"),
    (r"^(?:Transformer/posembed_input/)?pos_embedding$", "pos_embed"),
    (r"^cls$", "cls_token"),
    (r"^attn_pool/probe$", "attn_pool.latent"),
    (r"^embedding/", "patch_embed/proj/"),
    (r"/", "."),
)


def recognises(files: Files) -> bool:
    """Return whether it is a single `.npz` file."""
    return isinstance(files, SingleFile) and files.file.suffix.lower() == ".npz"


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read one `.npz` file."""
    assert isinstance(files, SingleFile)
    where = files.place
    stored = files.tensors()
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embedding/kernel" in stored), "")
    arrays = {name.removeprefix(prefix): array for name, array in stored.items() if name.startswith(prefix)}
    # Where big_vision has stacked all blocks (`scan`) to arrays [depth, ...], each block gets its own.
    for name in [name for name in arrays if name.startswith(f"{_BLOCK}/") and arrays[name].ndim]:
        for index, array in enumerate(arrays.pop(name)):
            arrays[name.replace(_BLOCK, f"{_BLOCK}_{index}", 1)] = array
    config = _config(arrays, where)
    tensors = renamed({name: _transposed(name, array) for name, array in arrays.items()}, _RULES, where)
    join_parts(tensors)
    for kind in ("weight", "bias"):
        join(tensors, [f"attn_pool.k.{kind}", f"attn_pool.v.{kind}"], f"attn_pool.kv.{kind}")
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=f"vit_w{config.width}_d{config.depth}_h{config.heads}_patch{config.patch_size}",
        config=config,
        preprocess=options.preprocess_or(None, where),
        labels=options.labels_or(None, config.num_classes, where),
        tensors=native_tensors(tensors, config, where),
    )


def _transposed(name: str, array: Tensor) -> Tensor:
    """Return a kernel [*inputs, *outputs] as a weight [outputs, inputs], and the bias of all heads as one."""
    if name.endswith("embedding/kernel"):
        return array.permute(3, 2, 0, 1)
    if name.endswith("/kernel") and array.ndim > 1:
        return (array.flatten(0, -2) if name.endswith("/out/kernel") else array.flatten(1)).T
    return array.flatten() if name.endswith("/bias") else array


def _config(arrays: Mapping[str, Tensor], where: str) -> ViTConfig:
    """Return the architecture; big_vision adds positions to the patches alone, vit_jax to the CLS token too."""
    if "conv_root/kernel" in arrays:
        raise CheckpointError(f"{where}: a hybrid with a ResNet stem is read from timm's layout, not from .npz")
    vit_jax = "Transformer/posembed_input/pos_embedding" in arrays
    block = f"{_BLOCK}_0/"
    position = "Transformer/posembed_input/pos_embedding" if vit_jax else "pos_embedding"
    kernel = shape_of(arrays, "embedding/kernel", where, 4)
    query = shape_of(arrays, f"{block}MultiHeadDotProductAttention_{int(vit_jax)}/query/kernel", where, 3)
    hidden = shape_of(arrays, f"{block}MlpBlock_{3 if vit_jax else 0}/Dense_0/kernel", where, 2)
    head = shape_of(arrays, "head/kernel", where, 2)
    positions = shape_of(arrays, position, where, 3)
    class_token = "cls" in arrays
    count = positions[1] - int(class_token and vit_jax)
    edge = math.isqrt(max(count, 0))
    if edge < 1 or edge * edge != count:
        raise CheckpointError(f"{where}: {position} has shape {list(positions)}: no square grid")
    with validating(where):
        return ViTConfig(
            image_size=(edge * kernel[0], edge * kernel[0]),
            patch_size=kernel[0],
            width=kernel[3],
            depth=sum(re.fullmatch(rf"{_BLOCK}_\d+/LayerNorm_0/scale", name) is not None for name in arrays),
            heads=query[1],
            mlp_width=hidden[1],
            num_classes=head[1],
            in_channels=kernel[2],
            position_prefix=vit_jax,
            class_token=class_token,
            activation="gelu_tanh",
            pool="attention" if "MAPHead_0/probe" in arrays else "cls" if class_token else "mean",
        )
