"""The original JAX releases: `.npz` files of google-research/vision_transformer (AugReg) and big_vision.

Names and shapes: vit_jax/models_vit.py and big_vision/models/vit.py; timm's `_load_weights` reads the
same. The activation is JAX's GELU, the tanh approximation, which the weights were trained with (timm
and transformers run them with the exact GELU).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, native_tensors
from model.checkpoint.files import Files, SingleFile
from model.checkpoint.options import CheckpointOptions
from model.checkpoint.refusals import validating
from model.checkpoint.tensor_files.zip_files import npz_shapes, read_npz
from model.checkpoint.tensors import TensorSource
from model.config import ViTConfig
from model.errors import CheckpointError
from model.network.vit import meta_model

FORMAT: Final = "jax"

_PREFIXES: Final = ("", "opt/target/", "params/", "params/img/")
_RELEASED: Final = re.compile(r".*imagenet2012.*-res_(224|384)\.npz")
"""AugReg's fine-tuned files, e.g. `Ti_16-i21k-…--imagenet2012-steps_20k-lr_0.03-res_224.npz`."""


def recognises(files: Files) -> bool:
    """Return whether it is a single `.npz` file."""
    return isinstance(files, SingleFile) and files.file.suffix.lower() == ".npz"


def read(files: Files, options: CheckpointOptions) -> Checkpoint:
    """Read one `.npz` file."""
    assert isinstance(files, SingleFile)
    where = files.place
    options.refuse_architecture(where)
    shapes = npz_shapes(files.file)
    prefix = _prefix(shapes, where)
    shapes = {name: shape for name, shape in shapes.items() if name.startswith(prefix)}
    config = _config(TensorSource(_unstacked(_unprefixed(shapes, prefix), where), where))
    _check_size(shapes, config, where)
    arrays = _unprefixed(read_npz(files.file, shapes), prefix)
    stored = TensorSource(_unstacked(arrays, where), where)
    tensors = _convert(stored, config)
    stored.finish()
    match = _RELEASED.fullmatch(files.file.name)
    preset = f"google-{match[1]}" if match else None
    options, assumed = options.with_published(files.file.name, preset, config.num_classes)
    return Checkpoint(
        name=files.file.stem,
        source=files.source,
        format=FORMAT,
        architecture=f"vit_w{config.width}_d{config.depth}_h{config.heads}_patch{config.patch_size}",
        config=config,
        preprocess=options.preprocess_or(None, where),
        labels=options.labels_or(None, config.num_classes, where),
        tensors=native_tensors(tensors, config, where),
        assumed=assumed,
    )


def _prefix(names: Collection[str], where: str) -> str:
    """Return the prefix of the network's arrays: none, the optimiser's or the two-tower model's."""
    for prefix in _PREFIXES:
        if f"{prefix}embedding/kernel" in names:
            return prefix
    raise CheckpointError(f"{where}: missing key 'embedding/kernel'")


def _unprefixed(arrays: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): array for name, array in arrays.items()}


def _check_size(shapes: Mapping[str, Tensor], config: ViTConfig, where: str) -> None:
    """Refuse far more numbers than the network has before they are unpacked, as zeros pack to a thousandth.

    A few arrays more, as of a head that is not read, are named when all are taken.
    """
    stored = sum(array.numel() for array in shapes.values())
    needed = sum(tensor.numel() for tensor in meta_model(config).state_dict().values())
    if stored > 2 * needed:
        raise CheckpointError(f"{where}: holds {stored:,} numbers, a network of its shapes has {needed:,}")


def _unstacked(arrays: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return an array for each block where big_vision has stacked all blocks (`scan`) to arrays [depth, ...]."""
    prefix = "Transformer/encoderblock/"
    for name in [n for n in arrays if n.startswith(prefix)]:
        stack = arrays.pop(name)
        if stack.ndim < 1 or not 1 <= len(stack) <= 256:
            raise CheckpointError(f"{where}: {name} has shape {list(stack.shape)}: expected one entry a block")
        for index, array in enumerate(stack):
            arrays[f"Transformer/encoderblock_{index}/{name.removeprefix(prefix)}"] = array
    return arrays


def _config(stored: TensorSource) -> ViTConfig:
    """Return the architecture; big_vision adds positions to the patches alone, vit_jax to the CLS token too."""
    where = stored.where
    kernel = stored.shape("embedding/kernel")
    if len(kernel) != 4 or kernel[0] != kernel[1]:
        raise CheckpointError(f"{where}: embedding/kernel has shape {list(kernel)}: expected [p, p, channels, width]")
    if "conv_root/kernel" in stored:
        raise CheckpointError(f"{where}: a hybrid with a ResNet stem is read from timm's layout, not from .npz")
    vit_jax = "Transformer/posembed_input/pos_embedding" in stored
    attention = f"Transformer/encoderblock_0/MultiHeadDotProductAttention_{int(vit_jax)}/query/kernel"
    query = stored.shape(attention)
    hidden = stored.shape(f"Transformer/encoderblock_0/MlpBlock_{3 if vit_jax else 0}/Dense_0/kernel")
    head = stored.shape("head/kernel")
    if len(query) != 3 or len(hidden) != 2 or len(head) != 2:
        raise CheckpointError(f"{where}: {attention} has shape {list(query)}: expected [width, heads, head width]")
    depth = sum(name.endswith("/LayerNorm_0/scale") and "encoderblock_" in name for name in stored.names)
    class_token = "cls" in stored
    patch, _, channels, width = kernel
    position = "Transformer/posembed_input/pos_embedding" if vit_jax else "pos_embedding"
    positions = stored.shape(position)
    count = positions[1] - int(class_token and vit_jax) if len(positions) == 3 else 0
    edge = math.isqrt(max(count, 0))
    if edge < 1 or edge * edge != count:
        raise CheckpointError(f"{where}: {position} has shape {list(positions)}: no square grid")
    with validating(where):
        return ViTConfig(
            image_size=(edge * patch, edge * patch),
            patch_size=patch,
            width=width,
            depth=depth,
            heads=query[1],
            mlp_width=hidden[1],
            num_classes=head[1],
            in_channels=channels,
            position_prefix=vit_jax,
            class_token=class_token,
            activation="gelu_tanh",
            pool="attention" if "MAPHead_0/probe" in stored else "cls" if class_token else "mean",
        )


def _convert(stored: TensorSource, config: ViTConfig) -> dict[str, Tensor]:
    width, patch, channels = config.width, config.patch_size, config.in_channels
    vit_jax = config.position_prefix
    position = "Transformer/posembed_input/pos_embedding" if vit_jax else "pos_embedding"
    tensors = {
        "patch_embed.proj.weight": stored.take("embedding/kernel", patch, patch, channels, width).permute(3, 2, 0, 1),
        "patch_embed.proj.bias": stored.take("embedding/bias", width),
        "pos_embed": stored.take(position, 1, config.position_tokens, width),
    }
    if config.class_token:
        tensors["cls_token"] = stored.take("cls", 1, 1, width)
    attention, mlp, norm2 = (1, 3, 2) if vit_jax else (0, 0, 1)
    each = config.heads, width // config.heads
    for index in range(config.depth):
        block, to = f"Transformer/encoderblock_{index}/", f"blocks.{index}."
        heads = f"{block}MultiHeadDotProductAttention_{attention}/"
        qkv = f"{heads}query", f"{heads}key", f"{heads}value"
        tensors |= _norm(stored, f"{block}LayerNorm_0", f"{to}norm1", width)
        tensors |= _linear(stored, qkv, f"{to}attn.qkv", (width,), each)
        tensors |= _linear(stored, (f"{heads}out",), f"{to}attn.proj", each, (width,))
        tensors |= _norm(stored, f"{block}LayerNorm_{norm2}", f"{to}norm2", width)
        tensors |= _mlp(stored, f"{block}MlpBlock_{mlp}", f"{to}mlp", config)
    tensors |= _norm(stored, "Transformer/encoder_norm", "norm", width)
    if config.pool == "attention":
        heads = "MAPHead_0/MultiHeadDotProductAttention_0/"
        tensors["attn_pool.latent"] = stored.take("MAPHead_0/probe", 1, 1, width)
        tensors |= _linear(stored, (f"{heads}query",), "attn_pool.q", (width,), each)
        tensors |= _linear(stored, (f"{heads}key", f"{heads}value"), "attn_pool.kv", (width,), each)
        tensors |= _linear(stored, (f"{heads}out",), "attn_pool.proj", each, (width,))
        tensors |= _norm(stored, "MAPHead_0/LayerNorm_0", "attn_pool.norm", width)
        tensors |= _mlp(stored, "MAPHead_0/MlpBlock_0", "attn_pool.mlp", config)
    return tensors | _linear(stored, ("head",), "head", (width,), (config.num_classes,))


def _norm(stored: TensorSource, name: str, to: str, width: int) -> dict[str, Tensor]:
    return {f"{to}.weight": stored.take(f"{name}/scale", width), f"{to}.bias": stored.take(f"{name}/bias", width)}


def _mlp(stored: TensorSource, name: str, to: str, config: ViTConfig) -> dict[str, Tensor]:
    width, hidden = (config.width,), (config.mlp_width,)
    fc1 = _linear(stored, (f"{name}/Dense_0",), f"{to}.fc1", width, hidden)
    return fc1 | _linear(stored, (f"{name}/Dense_1",), f"{to}.fc2", hidden, width)


def _linear(
    stored: TensorSource, names: Sequence[str], to: str, inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> dict[str, Tensor]:
    """Fuse kernels [*inputs, *outputs] into one matrix [kernels * outputs, inputs], and their biases."""
    rows = math.prod(inputs)
    kernels = [stored.take(f"{name}/kernel", *inputs, *outputs).reshape(rows, -1).T for name in names]
    biases = [stored.take(f"{name}/bias", *outputs).flatten() for name in names]
    return {f"{to}.weight": torch.cat(kernels), f"{to}.bias": torch.cat(biases)}
