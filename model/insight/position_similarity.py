"""The similarity of the position embeddings, as figure 7 (middle) of the ViT paper shows it.

Dosovitskiy et al. 2020, section 4.5, https://arxiv.org/abs/2010.11929.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model.errors import InputError
from model.network.vit import VisionTransformer


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
