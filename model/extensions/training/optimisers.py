"""The optimisers of a recipe and their learning rates."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from model.errors import TrainingError
from model.extensions.training.recipe import Optimiser
from model.network.vit import VisionTransformer

# Prefix of the names of a stem's parameters.
_STEM: Final = "patch_embed.backbone."


class Position(NamedTuple):
    """A point of a schedule.

    Attributes:
        progress: share of the cycle that is done, from 0 to below 1.
        restarted: whether the cycle is the second one.
    """

    progress: float
    restarted: bool


def position(step: int, steps: int, restart: float) -> Position:
    """Return the position in a schedule of `steps` at `step`.

    A second cycle begins after the share `restart`, unless it is 0.
    """
    first = min(round(restart * steps), steps - 1)
    if step < first:
        return Position(step / first, restarted=False)
    return Position((step - first) / (steps - first), restarted=first > 0)


def rate_factor(progress: float, warmup: float) -> float:
    """Return the share of the peak learning rate: a linear warm-up, then a cosine to zero.

    Args:
        progress: share of the schedule that is done, 0...1.
        warmup: share of the schedule that the warm-up takes.
    """
    if progress < warmup:
        return max(progress / warmup, 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def layer_of(name: str, depth: int) -> int:
    """Return a parameter's layer: 0 for embeddings, i + 1 for block i, then `depth` + 1.

    BEiT (Bao et al. 2021, https://arxiv.org/abs/2106.08254) and timm number layers like this.
    """
    part, _, rest = name.partition(".")
    if part == "blocks":
        return int(rest.partition(".")[0]) + 1
    embeddings = ("patch_embed", "cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre")
    return 0 if part in embeddings else depth + 1


def muon(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """Return torch's Muon.

    Raises:
        TrainingError: this version of torch lacks it.
    """
    if not hasattr(torch.optim, "Muon"):
        raise TrainingError(f"recipe: muon needs torch 2.9 or later, this is {torch.__version__}")
    return torch.optim.Muon(groups, **settings)


def set_rates(optimisers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set all learning rates to a share of their peaks, which stay as `initial_lr`."""
    for optimiser in optimisers:
        for group in optimiser.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def as_matrices(filters: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return a matrix for Muon per convolution: its rows are the filters, in the same memory."""
    return {weight: weight.detach().flatten(1) for weight in filters}


def step_all(optimisers: Iterable[torch.optim.Optimizer], filters: Mapping[Tensor, Tensor]) -> None:
    """Update the weights by their gradients, and clear the gradients.

    Args:
        optimisers: the optimisers of all weights.
        filters: matrix of each convolution's filters, which gets their gradient.
    """
    for parameter, matrix in filters.items():
        matrix.grad = None if parameter.grad is None else parameter.grad.flatten(1)
        parameter.grad = None
    for optimiser in optimisers:
        optimiser.step()
        optimiser.zero_grad()


class ModelOptimiser:
    """AdamW on the weights of a model, and Muon on its matrices if the recipe asks for it.

    Attributes:
        all: the optimisers.
    """

    def __init__(self, model: VisionTransformer, settings: Optimiser) -> None:
        self._model = model
        self._settings = settings
        parameters = dict(model.named_parameters())
        self._filters = as_matrices(
            p for name, p in parameters.items() if name.startswith(_STEM) and p.ndim == 4
        )
        adamw: list[dict[str, Any]] = []
        matrices: list[dict[str, Any]] = []
        for name, parameter in parameters.items():
            scale = settings.layer_decay ** (
                model.config.depth + 1 - layer_of(name, model.config.depth)
            )
            weight = self._filters.get(parameter, parameter)
            if settings.name == "muon" and weight.ndim == 2 and name.startswith(("blocks.", _STEM)):
                matrices.append({"params": [weight], "lr": settings.muon_learning_rate * scale})
            else:
                decay = settings.weight_decay if weight.ndim > 1 else 0.0
                adamw.append(
                    {
                        "params": [weight],
                        "lr": settings.learning_rate * scale,
                        "weight_decay": decay,
                    }
                )
        self.all: list[torch.optim.Optimizer] = [torch.optim.AdamW(adamw, betas=settings.betas)]
        if matrices:
            self.all.append(
                muon(matrices, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw")
            )

    def set_rate(self, where: Position) -> float:
        """Set the learning rates of a position, and return AdamW's rate for the head."""
        factor = rate_factor(where.progress, self._settings.warmup)
        if where.restarted:
            factor *= self._settings.restart_rate
        set_rates(self.all, factor)
        return self._settings.learning_rate * factor

    def step(self) -> None:
        """Update the model by its gradients, and clear them."""
        if self._settings.clip_norm:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip_norm)
        step_all(self.all, self._filters)
