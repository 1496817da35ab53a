"""Tensors of timm's models under the names and in the layout of this project's one model."""

from collections.abc import Mapping
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from model.checkpoint.tensors import Rules, join, join_parts, renamed
from model.checkpoint.timm_arguments import EvaArguments, TimmArguments
from model.config import ViTConfig

_RULES: Final[Rules] = (
    (r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma"),  # BEiT, DeiT III
    (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),  # DINOv2's own code
    (r"^(blocks\.\d+\.mlp)\.w1\.", r"\1.fc1_g."),  # EVA-02's and DINOv3's own code
    (r"^(blocks\.\d+\.mlp)\.w2\.", r"\1.fc1_x."),
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
    (r"^(blocks\.\d+\.mlp)\.ffn_ln\.", r"\1.norm."),
    (r"^(blocks\.\d+\.attn)\.inner_attn_ln\.", r"\1.norm."),
    (r"\.rel_pos\.relative_", ".relative_"),
    # A ResNet stem without stages consists of its root.
    (r"^patch_embed\.backbone\.(conv|norm)\.", r"patch_embed.backbone.stem.\1."),
)
_MLP: Final = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def native_names(
    tensors: Mapping[str, Tensor],
    arguments: TimmArguments | EvaArguments,
    config: ViTConfig,
    where: str,
) -> dict[str, Tensor]:
    """Return tensors under the model's own names, which differ from timm's in a few places.

    A tensor of an unexpected shape keeps its name, and is refused later.
    """
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("relative_position_index")
    }
    result = renamed(kept, _RULES, where)
    for name in [name for name in result if name.endswith(".attn.q_bias")]:
        # Only queries and values have a bias.
        parts = [name.replace("q_bias", f"{part}_bias") for part in "qkv"]
        result[parts[1]] = torch.zeros_like(result[name])
        join(result, parts, name.replace("q_bias", "qkv.bias"))
    if isinstance(arguments, EvaArguments):
        return arguments.renamed(result, where)
    join_parts(result)
    if config.relative_position_bias:
        return _with_position_tables(result, config)
    return result


def _with_position_tables(tensors: dict[str, Tensor], config: ViTConfig) -> dict[str, Tensor]:
    """Replace each MLP of relative positions by the table that it makes."""
    blocks = [f"blocks.{index}.attn" for index in range(config.depth)]
    targets = {"shared_rel_pos": blocks, **{f"{block}.rel_pos": [block] for block in blocks}}
    result = dict(tensors)
    for source, attentions in targets.items():
        names = [f"{source}.mlp.{part}" for part in _MLP]
        if not all(name in result for name in names):
            continue
        table = _table_of_mlp([result[name] for name in names], config)
        if table is None:
            continue
        for name in names:
            del result[name]
        result |= {f"{attention}.relative_position_bias_table": table for attention in attentions}
    return result


def _table_of_mlp(layers: list[Tensor], config: ViTConfig) -> Tensor | None:
    """Return the table that an MLP makes of logarithmic offsets, timm's kind "cr".

    Liu et al. 2022, Swin V2. The table is [offsets, heads] float32, with zeros for the CLS token.

    Args:
        layers: tensors of the MLP, in the order of `_MLP`.
        config: architecture of the network.

    Returns:
        None if a tensor has another shape, or is not dense floating point.
    """
    width = layers[1].numel()
    heads = config.heads
    if [tuple(layer.shape) for layer in layers] != [(width, 2), (width,), (heads, width), (heads,)]:
        return None
    if not all(layer.is_floating_point() and layer.layout == torch.strided for layer in layers):
        return None
    rows, columns = (
        torch.arange(1 - edge, edge, device=layers[0].device, dtype=torch.float32)
        for edge in config.grid
    )
    offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    logarithmic = torch.sign(offsets) * torch.log(1.0 + offsets.abs())
    first, first_bias, second, second_bias = (layer.float() for layer in layers)
    table = F.linear(F.relu(F.linear(logarithmic, first, first_bias)), second, second_bias)
    # Without this, the ReLU would hide values that are not finite.
    table = table + sum(0 * layer.sum() for layer in layers)
    return F.pad(table, (0, 0, 0, 3 * config.class_token))
