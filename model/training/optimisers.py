"""The optimisers of a recipe, with their parameter groups, and the schedule of a run and its learning rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.errors import TrainingError
from model.training.recipe import Optimiser


def make_optimisers(weights: Mapping[str, Tensor], settings: Optimiser, depth: int) -> list[torch.optim.Optimizer]:
    """Return AdamW, followed by Muon where the recipe asks for it.

    AdamW's groups are the decayed parameters, then the spared ones. With layer-wise decay there is a
    pair for each layer, the embeddings' first, and a group of Muon's for each block; each group's `lr`
    is its peak.

    Args:
        weights: float32, by the model's parameter names.
        depth: number of the model's blocks.

    Raises:
        TrainingError: this torch has no Muon.
    """
    scales = [1.0]
    if settings.layer_decay != 1:
        scales = [settings.layer_decay ** (depth + 1 - layer) for layer in range(depth + 2)]
    muon, decayed, spared = ([list[Tensor]() for _ in scales] for _ in range(3))
    for name, weight in weights.items():
        layer = layer_of(name, depth) if len(scales) > 1 else 0
        group = decayed if weight.ndim > 1 else spared
        if settings.name == "muon" and weight.ndim == 2 and name.startswith("blocks."):
            group = muon
        group[layer].append(weight)
    groups: list[dict[str, Any]] = []
    for scale, matrices, vectors in zip(scales, decayed, spared, strict=True):
        rate = settings.learning_rate * scale
        groups += [{"params": matrices, "lr": rate}, {"params": vectors, "lr": rate, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
    )
    if settings.name == "adamw":
        return [adamw]
    if not hasattr(torch.optim, "Muon"):
        raise TrainingError(f"optimiser muon needs torch 2.9 or later, this is {torch.__version__}")
    peak = settings.muon_learning_rate
    blocks = [{"params": group, "lr": peak * scale} for scale, group in zip(scales, muon, strict=True) if group]
    return [
        adamw,
        torch.optim.Muon(blocks, lr=peak, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"),
    ]


def layer_of(name: str, depth: int) -> int:
    """Return a parameter's layer: 0 for the embeddings, i + 1 for block i, `depth` + 1 for all that follows the blocks.

    BEiT's numbering (Bao et al. 2021, https://arxiv.org/abs/2106.08254), also timm's.
    """
    part, _, rest = name.partition(".")
    if part == "blocks":
        return int(rest.partition(".")[0]) + 1
    embeddings = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
    return 0 if part in embeddings else depth + 1


@dataclass(frozen=True)
class Schedule:
    """The length of a run, in steps and in time; it ends with whichever comes first.

    Attributes:
        steps: updates in all.
        seconds: wall time of training; None where it is not limited.
    """

    steps: int
    seconds: float | None

    def progress(self, steps: int, seconds: float) -> float:
        """Return the share of the schedule that is done after `steps` and `seconds`; 1 or more: it is over."""
        by_steps = steps / self.steps
        return by_steps if self.seconds is None else max(by_steps, seconds / self.seconds)

    def seconds_left(self, steps: int, seconds: float, seconds_per_step: float) -> float:
        """Return the seconds until the schedule ends at this pace, after `steps` and `seconds`."""
        left = seconds_per_step * (self.steps - steps)
        if self.seconds is not None:
            left = min(left, self.seconds - seconds)
        return max(left, 0.0)


def rate_factor(progress: float, warmup: float) -> float:
    """Return the share of the peak learning rate: a linear warm-up from almost zero, then a cosine to zero.

    Both arguments are shares of the schedule, 0...1: the part that is done, and the part that the warm-up takes.
    """
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))
