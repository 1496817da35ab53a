"""Training in reduced precision with float32 master weights, and their exponential moving average (EMA).

A working copy in another dtype does the arithmetic, forward and backward, without autocast; updates go to the
masters, since late and small updates would be lost if they were rounded to bfloat16 at each step. The average and
its warm-up are those of TensorFlow's `ExponentialMovingAverage` and timm's `ModelEmaV3`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from model.network.vit import VisionTransformer
from model.training.optimisers import make_optimisers, rate_factor
from model.training.recipe import Recipe


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
        model.to(dtype)
        self._optimisers = make_optimisers(self._masters, recipe.optimiser, model.config.depth)
        self._peaks = [[group["lr"] for group in o.param_groups] for o in self._optimisers]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the float32 weights by name: their moving average if the recipe keeps it, else the masters."""
        return dict(self._average or self._masters)

    def set_rate(self, progress: float) -> float:
        """Set all learning rates for this share of the schedule, 0...1, and return AdamW's."""
        factor = rate_factor(progress, self._settings.warmup)
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return self._settings.learning_rate * factor

    def step(self) -> None:
        """Update the masters by the working copy's gradients, which are cleared, and the working copy after them."""
        for master, parameter in zip(self._masters.values(), self._model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if self._settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(self._masters.values()), self._settings.clip_norm)
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
