"""Training in reduced precision with float32 master weights.

Reduced precision works without autocast: the updates go to float32 masters, and a working copy of them in
another dtype does the arithmetic, forward and backward. Rounded to bfloat16 at each step, late and small
updates would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from model.network.vit import VisionTransformer
from model.training.ema import update_average, warmed_up_decay
from model.training.optimisers import make_optimisers
from model.training.recipe import Recipe
from model.training.schedule import rate_factor


class MixedPrecisionOptimiser:
    """Float32 master weights, the optimisers that update them, and their moving average.

    Args:
        model: in float32 on the training device; it becomes the working copy.
        dtype: of the working copy.
        recipe: optimiser, clipping and EMA decay.

    Raises:
        TrainingError: this torch lacks the recipe's optimiser.
    """

    def __init__(self, model: VisionTransformer, dtype: torch.dtype, recipe: Recipe) -> None:
        self._model = model
        self._settings, self._ema_decay = recipe.optimiser, recipe.ema_decay
        self._names = [name for name, _ in model.named_parameters()]
        self._masters = [parameter.detach().clone() for parameter in model.parameters()]
        self._average = [master.clone() for master in self._masters] if recipe.ema_decay else []
        model.to(dtype)
        self._optimisers = make_optimisers(self._by_name(self._masters), recipe.optimiser, model.config.depth)
        self._peaks = [[group["lr"] for group in o.param_groups] for o in self._optimisers]

    @property
    def weights(self) -> dict[str, Tensor]:
        """The float32 weights by name: their moving average where the recipe asks for one, else the masters."""
        return self._by_name(self._average or self._masters)

    def set_rate(self, progress: float) -> float:
        """Set all learning rates for this share of the schedule, 0...1, and return AdamW's."""
        factor = rate_factor(progress, self._settings.warmup)
        for optimiser, peaks in zip(self._optimisers, self._peaks, strict=True):
            for group, peak in zip(optimiser.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
        return self._settings.learning_rate * factor

    def step(self) -> None:
        """Update the masters by the working copy's gradients, which are cleared, and the working copy after them."""
        for master, parameter in zip(self._masters, self._model.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        if self._settings.clip_norm:
            torch.nn.utils.clip_grad_norm_(self._masters, self._settings.clip_norm)
        for optimiser in self._optimisers:
            optimiser.step()
        self._publish(self._masters)

    def update_ema(self, steps: int) -> None:
        """Update the moving average, if there is one, after a step that `steps` others went before."""
        if self._average:
            update_average(self._average, self._masters, warmed_up_decay(self._ema_decay, steps))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the working copy hold the moving average, if there is one."""
        if self._average:
            self._publish(self._average)
        yield
        if self._average:
            self._publish(self._masters)

    def is_finite(self) -> bool:
        """Return whether all master weights are finite."""
        return all(bool(master.isfinite().all()) for master in self._masters)

    def state_dict(self) -> dict[str, Any]:
        """Return masters, moving average and the optimisers' state."""
        state: dict[str, Any] = {
            "weights": self._by_name(self._masters),
            "optimisers": [optimiser.state_dict() for optimiser in self._optimisers],
        }
        if self._average:
            state["average"] = self._by_name(self._average)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; further keys are ignored."""
        with torch.no_grad():
            for name, master in self._by_name(self._masters).items():
                master.copy_(state["weights"][name])
            if self._average:
                for name, mean in self._by_name(self._average).items():
                    mean.copy_(state["average"][name])
        self._publish(self._masters)
        for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)

    def _by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self._names, tensors, strict=True))

    @torch.no_grad()
    def _publish(self, weights: list[Tensor]) -> None:
        """Copy masters, or their average, to the working copy."""
        torch._foreach_copy_(list(self._model.parameters()), weights)
