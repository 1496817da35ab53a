"""Conversion of an architecture, its position embeddings and its preprocessing to another input size."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from model.checkpoint.refusals import validating
from model.config import PreprocessConfig, Size, ViTConfig
from model.network.layers.position import resize_position_embedding, resize_relative_table
from model.network.vit import meta_model


def resized_config(config: ViTConfig, size: Size, source: str) -> ViTConfig:
    """Return `config` for another input size, checked again as a whole; a remainder is dropped.

    Raises:
        CheckpointError: more tokens than are allowed, or smaller than a patch.
    """
    remainder = bool(size[0] % config.patch_size or size[1] % config.patch_size)
    with validating(f"{source}: image size {size[0]}x{size[1]}"):
        return ViTConfig.model_validate({**config.model_dump(), "image_size": size, "drop_remainder": remainder})


def resized_positions(
    tensors: Mapping[str, Tensor], old: ViTConfig, new: ViTConfig, *, antialias: bool = True
) -> dict[str, Tensor]:
    """Return the tensors of a model of configuration `old` for `new`, whose grid alone differs.

    `antialias` is `resize_position_embedding`'s.
    """
    resized = dict(tensors)
    if old.position_embedding == "sincos2d":
        resized["pos_embed"] = meta_model(new).fixed_position_embedding()
    elif old.position_embedding == "learned":
        resized["pos_embed"] = resize_position_embedding(
            tensors["pos_embed"],
            prefix_tokens=old.prefix_tokens if old.position_prefix else 0,
            old_grid=old.grid,
            new_grid=new.grid,
            antialias=antialias,
        )
    for name in tensors:
        if name.endswith(".relative_position_bias_table"):
            resized[name] = resize_relative_table(tensors[name], old.grid, new.grid)
    return resized


def resized_preprocess(preprocess: PreprocessConfig, size: Size) -> PreprocessConfig:
    """Return `preprocess` for another input size; the share of the picture that the crop keeps stays as it was."""
    kept = [have / total for have, total in zip(preprocess.size, preprocess.resize_size, strict=True)]
    resize_size = tuple(max(n, int(n / share)) for n, share in zip(size, kept, strict=True))
    return preprocess.model_copy(update={"size": size, "resize_size": resize_size})
