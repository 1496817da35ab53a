"""The explanation methods by name, and maps over the patch grid made with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from model.config import ViTConfig
from model.errors import InputError
from model.explanation.gae import gae
from model.explanation.legrad import legrad
from model.explanation.relevance import relevance
from model.explanation.rollout import rollout
from model.explanation.token_maps import Floats, sharpened_maps, token_maps
from model.network.vit import VisionTransformer
from model.prediction import Rollout

_WEIGHTS_BYTES: Final = 64 << 20
"""Bound on the bytes of one block's attention weights that are alive at once; a pass has a few tensors of that size."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to explain a prediction.

    Attributes:
        tokens: (model, pixels [B, C, H, W], classes int64 [B]) -> how much each token mattered, float32 [B, N].
        class_specific: whether the map is of a class, or of the picture alone.
        maps: (tokens [B, N], config) -> maps over the patch grid; see `model.explanation.token_maps`.
    """

    tokens: Callable[[VisionTransformer, Tensor, Tensor], Tensor]
    class_specific: bool = True
    maps: Callable[[Floats, ViTConfig], tuple[Floats, Floats]] = token_maps


def _rollout(model: VisionTransformer, pixels: Tensor, classes: Tensor, *, parameters: Rollout) -> Tensor:
    return rollout(model, pixels, fusion=parameters.fusion, discard_ratio=parameters.discard)


class _Table(dict[str, Method]):
    """Methods by name; that of a rollout with parameters is made when it is looked up."""

    def __missing__(self, name: str) -> Method:
        parameters = Rollout.of(name)
        if parameters is None:
            raise KeyError(name)
        return Method(partial(_rollout, parameters=parameters), class_specific=False)


METHODS: Final[Mapping[str, Method]] = MappingProxyType(
    _Table(
        relevance=Method(relevance, maps=sharpened_maps),
        rollout=Method(partial(_rollout, parameters=Rollout()), class_specific=False),
        gae=Method(gae),
        legrad=Method(legrad),
    )
)


def explain(model: VisionTransformer, pixels: Tensor, classes: Tensor, method: str) -> Tensor:
    """Return a map for each image, of its class where the method is class-specific.

    Args:
        pixels: [B, C, H, W], normalised, in the model's dtype.
        classes: int64 [B].
        method: a name in `METHODS`, or that of a rollout with parameters (`Rollout.method`).

    Returns:
        float32 [B, rows, columns] on the CPU, not negative, each map summing to 1. Where a method finds nothing, the
        map is even.

    Raises:
        InputError: there is no such method.
    """
    return explain_with_mass(model, pixels, classes, method)[0]


def explain_with_mass(model: VisionTransformer, pixels: Tensor, classes: Tensor, method: str) -> tuple[Tensor, Tensor]:
    """Return the maps of `explain`, and for each the share that fell on patches and not on prefix tokens: float32 [B].

    Raises:
        InputError: there is no such method.
    """
    try:
        wanted = METHODS[method]
    except KeyError:
        raise InputError("method", f"method {method[:20]!r}: expected one of {', '.join(METHODS)}") from None
    config = model.config
    images = max(1, _WEIGHTS_BYTES // (4 * config.heads * config.tokens**2))
    parts = zip(torch.split(pixels, images), torch.split(classes, images), strict=True)
    tokens = torch.cat([wanted.tokens(model, *part) for part in parts])
    maps, mass = wanted.maps(tokens.float().cpu().numpy(), config)
    return torch.from_numpy(maps), torch.from_numpy(mass)
