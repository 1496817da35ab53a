"""The original JAX releases: `.npz` files of google-research/vision_transformer and big_vision.

Source of names and shapes: vit_jax/models_vit.py and big_vision/models/vit.py; timm's
`_load_weights` reads the same. The activation is JAX's GELU, the tanh approximation that the
weights were trained with (timm and transformers run them with the exact GELU).
"""

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.tensors import Rules, join_parts, renamed
from model.checkpoint.unread_files import refuse_unread
from model.errors import CheckpointError
from model.extensions.formats.containers import network_in
from model.extensions.formats.inferred import InferredNetwork
from model.extensions.formats.layouts import Layout
from model.extensions.formats.shapes import shape_of
from model.extensions.formats.single_files import content_of

FORMAT: Final = "jax"

# Prefixes of the network's arrays in an optimiser, or in a model of two towers.
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

# This code always has these parts; an absent array was lost.
_HABITS: Final = {
    "act_layer": "gelu_tanh",
    "norm_order": "pre",
    "norm_eps": 1e-6,
    "fc_norm": False,
    "patch_bias": True,
    "qkv_bias": True,
    "final_norm": True,
}


def read(files: Files, options: CheckpointOptions) -> Checkpoint | None:
    """Read one `.npz` file with JAX's names; return None for any other."""
    if not isinstance(files, SingleFile) or files.file.suffix.lower() != ".npz":
        return None
    where = files.title
    stored = content_of(files)
    if not any(name.endswith("/kernel") for name in stored):
        return None
    refuse_unread(files, options)
    arrays = _network_arrays(files.prepared(network_in(stored, None, where).tensors))
    if "conv_root/kernel" in arrays:
        raise CheckpointError(
            f"{where}: a hybrid with a ResNet stem is read from timm's layout, not from .npz"
        )
    # big_vision adds positions only to the patches, vit_jax to the CLS token too.
    is_vit_jax = "Transformer/posembed_input/pos_embedding" in arrays
    attention = f"{_BLOCK}_0/MultiHeadDotProductAttention_{int(is_vit_jax)}"
    heads = shape_of(arrays, f"{attention}/query/kernel", where, 3)[1]
    transposed = {name: _transposed(name, array) for name, array in arrays.items()}
    tensors = renamed(transposed, _RULES, where)
    join_parts(tensors)
    stated = {
        **_HABITS,
        "num_heads": heads,
        "no_embed_class": not is_vit_jax,
        "global_pool": _pooling(tensors),
    }
    layout = Layout(FORMAT, "", _RULES, _HABITS)
    preprocess = options.preprocess_or(None, where)
    config = InferredNetwork(where, "", {}, layout, tensors, stated).config(preprocess)
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


def _network_arrays(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays of the network without a prefix, a stacked array as one array per block."""
    prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embedding/kernel" in stored), "")
    arrays = {
        name.removeprefix(prefix): array
        for name, array in stored.items()
        if name.startswith(prefix)
    }
    # With `scan`, big_vision stacks the arrays of all blocks to arrays [depth, ...].
    stacked = [name for name in arrays if name.startswith(f"{_BLOCK}/") and arrays[name].ndim]
    for name in stacked:
        for index, array in enumerate(arrays.pop(name)):
            arrays[name.replace(_BLOCK, f"{_BLOCK}_{index}", 1)] = array
    return arrays


def _pooling(tensors: Mapping[str, Tensor]) -> str:
    """Return timm's name of the pooling."""
    if "attn_pool.latent" in tensors:
        return "map"
    return "token" if "cls_token" in tensors else "avg"


def _transposed(name: str, array: Tensor) -> Tensor:
    """Return a kernel [*inputs, *outputs] as a weight [outputs, inputs], and a bias as a vector."""
    if name.endswith("embedding/kernel"):
        return array.permute(3, 2, 0, 1)
    if name.endswith("/kernel") and array.ndim > 1:
        return (array.flatten(0, -2) if name.endswith("/out/kernel") else array.flatten(1)).T
    return array.flatten() if name.endswith("/bias") else array
