"""What the embeddings learned: the principal components of the patch filters, and the similarity of the positions.

Both as figure 7 (left, middle) of the ViT paper shows them: Dosovitskiy et al. 2020, section 4.5,
https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model.errors import InputError
from model.network.layers.patch_embed import PatchEmbed
from model.network.vit import VisionTransformer


@dataclass(frozen=True)
class PatchFilters:
    """Principal components of the patch-embedding filters.

    Attributes:
        components: float32 [M, C, P, P], each of length 1; their signs have no meaning.
        explained: float32 [M], the share of the filters' variance that lies along each, falling.
    """

    components: Tensor
    explained: Tensor


def patch_filters(model: VisionTransformer, count: int = 28) -> PatchFilters:
    """Return the directions in pixel space along which the D patch filters differ most.

    The filters are samples with C*P*P values each; their mean is subtracted before the decomposition.

    Args:
        model: any but a hybrid.
        count: how many components, 28 in the paper; fewer where the filters have fewer.

    Raises:
        InputError: the patches are those of a convolutional stem's features, not of pixels.
    """
    config = model.config
    if config.stem is not None or config.conv_stem is not None:
        raise InputError("checkpoint", "no patch filters: the patches are features of a stem of convolutions")
    patch = model.patch_embed
    weight = (patch.proj if isinstance(patch, PatchEmbed) else patch.get_submodule("proj")).weight
    assert isinstance(weight, Tensor)
    filters = weight.detach().double().reshape(config.width, -1)  # [D, C*P*P] in both forms of the embedding
    filters = filters - filters.mean(dim=0)
    _, singular, directions = torch.linalg.svd(filters, full_matrices=False)
    variance = singular.square()
    shares = variance / variance.sum().clamp_min(torch.finfo(variance.dtype).tiny)
    shape = (-1, config.in_channels, config.patch_size, config.patch_size)
    return PatchFilters(directions[:count].float().reshape(shape), shares[:count].float())


def position_similarity(model: VisionTransformer) -> Tensor:
    """Return the cosine similarity of each learned position embedding to all, prefix tokens left out.

    It is float32 [gh, gw, gh, gw]; [i, j] is the map of the patch in row i and column j.

    Raises:
        InputError: the model has no learned embedding a position.
    """
    config = model.config
    if model.pos_embed is None or config.position_embedding != "learned":
        kind = "relative biases" if config.relative_position_bias else config.position_embedding
        raise InputError("checkpoint", f"no position similarity: positions are not learned embeddings ({kind})")
    prefix = config.prefix_tokens if config.position_prefix else 0
    embedding = torch.nn.functional.normalize(model.pos_embed.detach()[0, prefix:].double(), dim=1)
    return (embedding @ embedding.T).float().reshape(*config.grid, *config.grid)
