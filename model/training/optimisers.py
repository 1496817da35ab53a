"""The optimisers of a recipe, their schedule, and training in reduced precision with float32 master weights.

A working copy in another dtype does the arithmetic, forward and backward, without autocast; updates go to the
masters, since late and small updates would be lost if they were rounded to bfloat16 at each step. The exponential
moving average (EMA) of the masters and its warm-up are those of TensorFlow's `ExponentialMovingAverage` and timm's
`ModelEmaV3`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from model.errors import TrainingError
from model.network.vit import VisionTransformer
from model.training.recipe import Optimiser, Recipe

_STEM: Final = "patch_embed.backbone."
"""What the names of a stem's parameters begin with."""


def make_optimisers(weights: Mapping[str, Tensor], settings: Optimiser, depth: int) -> list[torch.optim.Optimizer]:
    """Return AdamW, followed by Muon where the recipe asks for it.

    AdamW's groups are the decayed parameters, then the spared ones. With layer-wise decay there is a
    pair for each layer, the embeddings' first, and a group of Muon's for each block; each group's `lr`
    is its peak.

    Args:
        weights: float32, by the model's parameter names; convolutions of a stem as matrices of flat filters.
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
        if settings.name == "muon" and weight.ndim == 2 and name.startswith(("blocks.", _STEM)):
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


class Position(NamedTuple):
    """A point of a schedule.

    Attributes:
        progress: the share of the cycle that is done, from 0; 1 or more: the schedule is over.
        restarted: whether the cycle is the second one.
    """

    progress: float
    restarted: bool


@dataclass(frozen=True)
class Schedule:
    """The length of a run, in steps and in time; it ends with whichever comes first.

    Attributes:
        steps: updates in all.
        seconds: wall time of training; None where it is not limited.
        restart: the share of both after which the second cycle begins; 0: there is one cycle.
    """

    steps: int
    seconds: float | None
    restart: float = 0.0

    def at(self, steps: int, seconds: float) -> Position:
        """Return where the schedule is after `steps` and `seconds`."""
        first, began = min(round(self.restart * self.steps), self.steps - 1), self.restart * (self.seconds or 0.0)
        if first:
            progress = max(steps / first, seconds / began if began else 0.0)
            if progress < 1:
                return Position(progress, restarted=False)
        progress = (steps - first) / (self.steps - first)
        if self.seconds is not None:
            progress = max(progress, (seconds - began) / (self.seconds - began))
        return Position(progress, restarted=first > 0)

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


def warmed_up_decay(decay: float, steps: int) -> float:
    """Return the decay, 0...1, after `steps` updates: less in the first updates, when the average has seen little."""
    return min(decay, (1 + steps) / (10 + steps))


@torch.no_grad()
def update_average(average: Sequence[Tensor], weights: Sequence[Tensor], decay: float) -> None:
    """Set average = decay * average + (1 - decay) * weights, in place."""
    torch._foreach_lerp_(list(average), list(weights), 1 - decay)


class MixedPrecisionOptimiser:
    """Float32 master weights, the optimisers that update them, and their moving average.

    Args:
        model: in float32 on the training device; it becomes the working copy.
        dtype: of the working copy.

    Raises:
        TrainingError: this torch lacks the recipe's optimiser.
    """

    def __init__(self, model: VisionTransformer, dtype: torch.dtype, recipe: Recipe) -> None:
        self._model = model
        self._settings, self._ema_decay = recipe.optimiser, recipe.ema_decay
        self._masters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self._average = {name: w.clone() for name, w in self._masters.items()} if recipe.ema_decay else {}
        # Muon takes matrices: a stem's filters are rows. The views share the masters' memory.
        self._updated = {
            name: w.view(len(w), -1) if w.ndim == 4 and name.startswith(_STEM) else w
            for name, w in self._masters.items()
        }
        model.to(dtype)
        self._optimisers = make_optimisers(self._updated, recipe.optimiser, model.config.depth)
        self._peaks = [[group["lr"] for group in o.param_groups] for o in self._optimisers]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights by name: their moving average if the recipe keeps it, else the masters."""
        return dict(self._average or self._masters)

    @torch.no_grad()
    def start_stem(self, weights: Mapping[str, Tensor]) -> None:
        """Replace the stem's weights, float32 by their names within it, before the first step."""
        for name, weight in weights.items():
            for kept in (self._masters, self._average):
                if kept:
                    kept[_STEM + name].copy_(weight)
        self._publish(self._masters)

    def set_rate(self, position: Position) -> float:
        """Set all learning rates for this point of the schedule, and return AdamW's."""
        factor = rate_factor(min(position.progress, 1.0), self._settings.warmup)
        if position.restarted:
            factor *= self._settings.restart_rate
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return self._settings.learning_rate * factor

    def step(self) -> None:
        """Update the masters by the working copy's gradients, which are cleared, and the working copy after them."""
        for master, parameter in zip(self._updated.values(), self._model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float().reshape(master.shape)
            parameter.grad = None
        if self._settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(self._updated.values()), self._settings.clip_norm)
        for optimiser in self._optimisers:
            optimiser.step()
        self._publish(self._masters)

    def update_ema(self, steps: int) -> None:
        """Update the moving average, if it is kept, after step number `steps`, counted from 0."""
        if self._average:
            decay = warmed_up_decay(self._ema_decay, steps)
            update_average(list(self._average.values()), list(self._masters.values()), decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the working copy hold the moving average, if it is kept."""
        if self._average:
            self._publish(self._average)
        yield
        if self._average:
            self._publish(self._masters)

    def is_finite(self) -> bool:
        """Return whether all master weights are finite."""
        return all(bool(master.isfinite().all()) for master in self._masters.values())

    def state_dict(self) -> dict[str, Any]:
        """Return masters, moving average and the optimisers' state."""
        average = {"average": self._average} if self._average else {}
        optimisers = [optimiser.state_dict() for optimiser in self._optimisers]
        return {"weights": self._masters, "optimisers": optimisers, **average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; further keys are ignored."""
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["weights"][name])
            for name, mean in self._average.items():
                mean.copy_(state["average"][name])
        self._publish(self._masters)
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)

    @torch.no_grad()
    def _publish(self, weights: Mapping[str, Tensor]) -> None:
        """Copy masters, or their average, to the working copy."""
        torch._foreach_copy_(list(self._model.parameters()), list(weights.values()))
