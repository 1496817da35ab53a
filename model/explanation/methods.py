"""The explanation methods by name, and maps over the patch grid made with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from model.explanation.gae import gae
from model.explanation.legrad import legrad
from model.explanation.relevance import relevance
from model.explanation.rollout import rollout
from model.explanation.token_maps import sharpened_maps, token_maps
from model.network.vit import VisionTransformer
from model.prediction import METHODS, MapRequest, Method

_WEIGHTS_BYTES: Final = 64 << 20
"""Bound on the bytes of one block's attention weights that are alive at once; a pass has a few tensors of that size."""

_OF_CLASS: Final[Mapping[Method, Callable[[VisionTransformer, Tensor, Tensor], Tensor]]] = MappingProxyType(
    {"relevance": relevance, "gae": gae, "legrad": legrad}
)
"""(model, pixels [B, C, H, W], classes int64 [B]) -> how much each token mattered, float32 [B, N]."""

EXPLANATIONS: Final[tuple[Method, ...]] = tuple(method for method in METHODS if method != "cls")
"""The methods that have, or can have, a pass of their own: all but `cls`."""


def _tokens(model: VisionTransformer, pixels: Tensor, classes: Tensor, request: MapRequest) -> Tensor:
    if request.method == "rollout":
        return rollout(model, pixels, fusion=request.fusion or "mean", discard_ratio=request.discard or 0.0)
    return _OF_CLASS[request.method](model, pixels, classes)


def explain(model: VisionTransformer, pixels: Tensor, classes: Tensor, request: MapRequest) -> tuple[Tensor, Tensor]:
    """Return a map for each image, of its class where the method is class-specific.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        classes: int64 [B]; they count, and not the request's class.
        request: of a method in `EXPLANATIONS`.

    Returns:
        float32 [B, rows, columns] on the CPU, not negative, each map summing to 1; where a method finds nothing, the
        map is even. And float32 [B], the share that fell on patches and not on prefix tokens.
    """
    config = model.config
    images = max(1, _WEIGHTS_BYTES // (4 * config.heads * config.tokens**2))
    parts = zip(torch.split(pixels, images), torch.split(classes, images), strict=True)
    tokens = torch.cat([_tokens(model, *part, request) for part in parts]).float().cpu().numpy()
    # Relevance may be negative.
    maps, mass = (sharpened_maps if request.method == "relevance" else token_maps)(tokens, config)
    return torch.from_numpy(maps), torch.from_numpy(mass)
