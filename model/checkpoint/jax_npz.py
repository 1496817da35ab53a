"""The original JAX releases: `.npz` files of google-research/vision_transformer (AugReg) and
big_vision.

Names and shapes: vit_jax/models_vit.py and big_vision/models/vit.py; timm's `_load_weights` reads
the same. The activation is JAX's GELU, the tanh approximation, which the weights were trained with
(timm and transformers run them with the exact GELU).
"""

from typing import Final

from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.layouts import Layout
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.state_dict import Network
from model.checkpoint.tensors import Rules, join_parts, renamed, shape_of
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

# What this code always has; an array that is absent was lost.
_ALWAYS: Final = {
    **{"act_layer": "gelu_tanh", "norm_order": "pre", "norm_eps": 1e-6, "fc_norm": False},
    **dict.fromkeys(("patch_bias", "qkv_bias", "final_norm"), True),
}


def recognises(files: Files) -> bool:
    """Return whether it is a single `.npz` file."""
    return isinstance(files, SingleFile) and files.file.suffix.lower() == ".npz"


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read one `.npz` file."""
    assert isinstance(files, SingleFile)
    where = files.place
    stored = files.tensors()
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embedding/kernel" in stored), "")
    arrays = {
        name.removeprefix(prefix): array
        for name, array in stored.items()
        if name.startswith(prefix)
    }
    # Where big_vision has stacked all blocks (`scan`) to arrays [depth, ...], each block gets its
    # own.
    for name in [name for name in arrays if name.startswith(f"{_BLOCK}/") and arrays[name].ndim]:
        for index, array in enumerate(arrays.pop(name)):
            arrays[name.replace(_BLOCK, f"{_BLOCK}_{index}", 1)] = array
    if "conv_root/kernel" in arrays:
        raise CheckpointError(
            f"{where}: a hybrid with a ResNet stem is read from timm's layout, not from .npz"
        )
    # big_vision adds positions to the patches alone, vit_jax to the CLS token too.
    is_vit_jax = "Transformer/posembed_input/pos_embedding" in arrays
    attention = f"{_BLOCK}_0/MultiHeadDotProductAttention_{int(is_vit_jax)}"
    heads = shape_of(arrays, f"{attention}/query/kernel", where, 3)[1]
    tensors = renamed(
        {name: _transposed(name, array) for name, array in arrays.items()}, _RULES, where
    )
    join_parts(tensors)
    pool = "map" if "attn_pool.latent" in tensors else "token" if "cls_token" in tensors else "avg"
    stated = {**_ALWAYS, "num_heads": heads, "no_embed_class": not is_vit_jax, "global_pool": pool}
    preprocess = options.preprocess_or(None, where)
    config = Network(where, "", {}, Layout(FORMAT, "", _RULES, _ALWAYS), tensors, stated).config(
        preprocess
    )
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=f"vit_w{config.width}_d{config.depth}_h{config.heads}_patch{config.patch_size}",
        config=config,
        preprocess=preprocess,
        labels=options.labels_or(None, config.num_classes, where),
        tensors=native_tensors(tensors, config, where),
    )


def _transposed(name: str, array: Tensor) -> Tensor:
    """Return a kernel [*inputs, *outputs] as a weight [outputs, inputs], and the bias of all heads
    as one.
    """
    if name.endswith("embedding/kernel"):
        return array.permute(3, 2, 0, 1)
    if name.endswith("/kernel") and array.ndim > 1:
        return (array.flatten(0, -2) if name.endswith("/out/kernel") else array.flatten(1)).T
    return array.flatten() if name.endswith("/bias") else array
