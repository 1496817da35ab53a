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
    (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
    (r"\.rel_pos\.relative_", ".relative_"),
    (
        r"^patch_embed\.backbone\.(conv|norm)\.",
        r"patch_embed.backbone.stem.\1.",
    ),  # a root without stages is all of it
)
_MLP: Final = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")


def native_names(
    tensors: Mapping[str, Tensor],
    arguments: TimmArguments | EvaArguments,
    config: ViTConfig,
    where: str,
) -> dict[str, Tensor]:
    """Return tensors without the few names and layouts in which timm's models differ from this
    project's one model.

    What is not of the expected shape stays under its name, which is then refused.
    """
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("relative_position_index")
    }
    result = renamed(kept, _RULES, where)
    for name in [name for name in result if name.endswith(".attn.q_bias")]:  # keys have none then
        parts = [name.replace("q_bias", f"{part}_bias") for part in "qkv"]
        result[parts[1]] = torch.zeros_like(result[name])
        join(result, parts, name.replace("q_bias", "qkv.bias"))
    if isinstance(arguments, EvaArguments):
        return arguments.renamed(result, where)
    join_parts(result)
    blocks = [
        f"blocks.{index}.attn"
        for index in range(config.depth if config.relative_position_bias else 0)
    ]
    for source, targets in (
        ("shared_rel_pos", blocks),
        *((f"{block}.rel_pos", [block]) for block in blocks),
    ):
        layers = {
            name: result[name]
            for name in (f"{source}.mlp.{part}" for part in _MLP)
            if name in result
        }
        table = (
            _table_of_mlp(list(layers.values()), config)
            if targets and len(layers) == len(_MLP)
            else None
        )
        if table is not None:
            result = {name: t for name, t in result.items() if name not in layers}
            result |= {f"{target}.relative_position_bias_table": table for target in targets}
    return result


def _table_of_mlp(layers: list[Tensor], config: ViTConfig) -> Tensor | None:
    """Return the table that an MLP makes of logarithmic offsets (Liu et al. 2022, Swin V2), as
    timm's kind "cr".

    [offsets, heads] float32; the CLS token's entries, where there is one, are zero. None if a shape
    is another, or a tensor is not dense floating point.
    """
    width = layers[1].numel()
    if [tuple(t.shape) for t in layers] != [
        (width, 2),
        (width,),
        (config.heads, width),
        (config.heads,),
    ]:
        return None
    if not all(t.is_floating_point() and t.layout == torch.strided for t in layers):
        return None
    rows, columns = (
        torch.arange(1 - n, n, device=layers[0].device, dtype=torch.float32) for n in config.grid
    )
    offsets = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).reshape(-1, 2)
    logarithmic = torch.sign(offsets) * torch.log(1.0 + offsets.abs())
    first, first_bias, second, second_bias = (t.float() for t in layers)
    table = F.linear(F.relu(F.linear(logarithmic, first, first_bias)), second, second_bias)
    table = table + sum(
        0 * t.sum() for t in layers
    )  # what is not finite does not vanish in the ReLU
    return F.pad(table, (0, 0, 0, 3 * config.class_token))
