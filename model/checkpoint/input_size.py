"""Another input size for a model: architecture, position embeddings and preprocessing."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from model.checkpoint.local_files import validating
from model.config import NetworkConfig, PreprocessConfig, ViTConfig, cropped_from
from model.layer_config import Size
from model.network.layers.position import resize_position_embedding, resize_relative_table
from model.network.vit import meta_model


class StoredNetwork(NamedTuple):
    """An architecture and its tensors.

    Attributes:
        resized_from: input size of the learned positions before they were resized; None if they
            are as stored.
    """

    config: NetworkConfig
    tensors: Mapping[str, Tensor]
    resized_from: Size | None = None


def resized_network(
    tensors: Mapping[str, Tensor],
    config: ViTConfig,
    size: Size,
    source: str,
    *,
    antialias: bool = True,
) -> StoredNetwork:
    """Return an architecture and its tensors for another input size; a remainder is dropped.

    Args:
        tensors: tensors of the architecture.
        config: the architecture, which is validated again as a whole.
        size: (rows, columns) in pixels.
        source: name of the checkpoint in messages.
        antialias: as for `resize_position_embedding`.

    Raises:
        CheckpointError: more tokens than are allowed, or smaller than a patch.
    """
    rows, columns = size
    remainder = bool(rows % config.patch_size or columns % config.patch_size)
    with validating(f"{source}: image size {rows}x{columns}"):
        new = ViTConfig.model_validate(
            {**config.model_dump(), "image_size": size, "drop_remainder": remainder}
        )
    resized = dict(tensors)
    if new.grid == config.grid:
        return StoredNetwork(new, resized)
    resized_from = None
    if config.position_embedding == "sincos2d":
        resized["pos_embed"] = meta_model(new).fixed_position_embedding()
    elif config.position_embedding == "learned":
        resized_from = config.image_size
        resized["pos_embed"] = resize_position_embedding(
            tensors["pos_embed"],
            prefix_tokens=config.prefix_tokens if config.position_prefix else 0,
            old_grid=config.grid,
            new_grid=new.grid,
            antialias=antialias,
        )
    for name in tensors:
        if name.endswith(".relative_position_bias_table"):
            resized[name] = resize_relative_table(tensors[name], config.grid, new.grid)
    return StoredNetwork(new, resized, resized_from)


def resized_preprocess(preprocess: PreprocessConfig, size: Size) -> PreprocessConfig:
    """Return `preprocess` for another input size; the crop keeps the same share of the picture.

    `crop_pct` is the share if it is stated, because `resize_size` is rounded.
    """
    if size == preprocess.size:
        return preprocess
    if preprocess.crop_pct is not None:
        resize_size = cropped_from(size, preprocess.crop_pct)
        return preprocess.model_copy(update={"size": size, "resize_size": resize_size})
    shares = [
        kept / total for kept, total in zip(preprocess.size, preprocess.resize_size, strict=True)
    ]
    sizes = tuple(max(edge, int(edge / share)) for edge, share in zip(size, shares, strict=True))
    return preprocess.model_copy(update={"size": size, "resize_size": sizes})
